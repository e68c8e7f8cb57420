/* Chunks of a call's arrays: where they lie, and how they are staged, taken and reduced. For collectives.c. */
#pragma once
#include "engine/engine.h"

/* The piece of a chunk: members' shares of it are equal, of whole cache lines. */
typedef enum { WHOLE, BEFORE, OWN, AFTER } Cut;

Array *sent_to(Group *g, int peer);       /* what goes to a member in the call: NULL: nothing */
Array *expected_from(Group *g, int peer); /* and the array as large as what the member sends */

void size_chunks(Group *g); /* of the arrays of a call that has begun */
void note_sizes(Group *g);  /* write behind the header what is sent, and where that lies */
uint64_t staged_bytes(Group *g); /* of each of this member's blocks, in that call */
int compare_sizes(Group *g); /* with what the senders have noted: 1, or 0 with a problem */

/* The address of byte `low` of an array from `owner` to `reader`, in the owner's staging block. */
char *in_block(const Group *g, int owner, int reader, uint64_t chunk, uint64_t low);

void stage(Group *g, uint64_t chunk);        /* into this member's block, for its readers */
void stage_others(Group *g, uint64_t chunk); /* what other members reduce */
void keep_own(Group *g);                     /* copy what goes from this member to itself */
void take(Group *g, uint64_t chunk);         /* copy the data that each sender staged */
void take_others(Group *g, uint64_t chunk);  /* copy the results of other members */

/* Prepare to reduce this member's piece of a chunk into an array, and do a part of it: 1 where all is done, 0 where
 * the caller has to reduce `parts` into `out`, and then reduce again. */
void begin_reduce(Group *g, int into, uint64_t chunk, Cut cut);
int reduce_on(Group *g);
