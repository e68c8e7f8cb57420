/* Words in memory that several processes map, and the memory orders of their loads and stores.
 *
 * A member publishes its writes by storing a counter (release). Another member that loads the counter's new
 * value (acquire) sees these writes. Before a member sleeps, it sets its flag and reads the counter again. A
 * publisher stores the counter, then reads the flags. One of the two must see the other's store, so these
 * stores and loads are sequentially consistent.
 *
 * The orders have names: a test weakens each, and checks that this is detected.
 */
#pragma once
#include <stdatomic.h>
#include <stdint.h>

#ifndef ORDER_OF_LOOK /* a member reads a counter, then the data behind it */
#define ORDER_OF_LOOK memory_order_acquire
#endif
#ifndef ORDER_OF_PUBLISH /* a member writes a counter, after the data and before it reads the flags */
#define ORDER_OF_PUBLISH memory_order_seq_cst
#endif
#ifndef ORDER_OF_CHECK /* a publisher reads the sleepers' flags */
#define ORDER_OF_CHECK memory_order_seq_cst
#endif
#ifndef ORDER_OF_SLEEP /* a sleeper sets its flag */
#define ORDER_OF_SLEEP memory_order_seq_cst
#endif
#ifndef ORDER_OF_LAST_LOOK /* a sleeper reads the counter again */
#define ORDER_OF_LAST_LOOK memory_order_seq_cst
#endif

#define LINE 64 /* bytes of a cache line: words that different members write never share one */

typedef _Atomic uint64_t Word;
_Static_assert(sizeof(Word) == 8 && ATOMIC_LLONG_LOCK_FREE == 2, "words are shared between processes");

static inline uint64_t look_at(const Word *word) { return atomic_load_explicit(word, ORDER_OF_LOOK); }
static inline uint64_t look_again(const Word *word) { return atomic_load_explicit(word, ORDER_OF_LAST_LOOK); }
static inline void put(Word *word, uint64_t value) { atomic_store_explicit(word, value, ORDER_OF_PUBLISH); }
static inline uint64_t sleepers_of(const Word *word) { return atomic_load_explicit(word, ORDER_OF_CHECK); }
static inline void add_sleeper(Word *word, uint64_t bit) { atomic_fetch_or_explicit(word, bit, ORDER_OF_SLEEP); }
static inline void remove_sleeper(Word *word, uint64_t bit) {
    atomic_fetch_and_explicit(word, ~bit, memory_order_relaxed);
}

static inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t round_up(uint64_t nbytes, uint64_t unit) { return (nbytes + unit - 1) / unit * unit; }
static inline uint64_t whole_lines(uint64_t nbytes) { return round_up(nbytes, LINE); }
