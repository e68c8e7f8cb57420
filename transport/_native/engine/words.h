/* Words in memory that several processes map, and the order in which their loads and stores are seen.
 *
 * A member publishes what it wrote by storing a counter, and another that loads the counter's new value sees
 * all of it: a release and an acquire. Before a member sleeps it sets its flag and looks once more. A
 * publisher stores, and then looks whether anybody sleeps. One of the two must see the other. So their stores
 * and loads are sequentially consistent.
 *
 * The orders have names, so that a test can weaken each of them and see that it is missed.
 */
#pragma once
#include <stdatomic.h>
#include <stdint.h>

#ifndef ORDER_OF_LOOK /* a member reads a counter, then the data behind it */
#define ORDER_OF_LOOK memory_order_acquire
#endif
#ifndef ORDER_OF_PUBLISH /* a counter is written, after what it stands for and before the next one */
#define ORDER_OF_PUBLISH memory_order_seq_cst
#endif
#ifndef ORDER_OF_CHECK /* a publisher reads whether anybody sleeps */
#define ORDER_OF_CHECK memory_order_seq_cst
#endif
#ifndef ORDER_OF_SLEEP /* a sleeper sets its flag */
#define ORDER_OF_SLEEP memory_order_seq_cst
#endif
#ifndef ORDER_OF_LAST_LOOK /* a sleeper reads the counter once more */
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
