/* Chunks of a call's arrays: their addresses, and how they are staged, copied out and reduced. For collectives.c. */
#pragma once
#include "engine/engine.h"

/* A part of a chunk: all of it, this member's share, or the shares before or after. Shares are equal, of whole lines. */
typedef enum { WHOLE, BEFORE, OWN, AFTER } Cut;

Array *sent_to(Group *g, int peer);       /* the call's data for a member; NULL: none */
Array *expected_from(Group *g, int peer); /* an array of the size of the member's data; NULL: none */

void size_chunks(Group *g); /* set the size and the number of the call's chunks */
void note_sizes(Group *g);  /* write the sizes and places of the sent data behind the header */
uint64_t staged_bytes(Group *g); /* the bytes of each of this member's blocks that the call uses */
int compare_sizes(Group *g); /* with the senders' notes: 1, or 0 with a problem */

/* The address of byte `low` of an array from `owner` to `reader`, in the owner's staging block. */
char *in_block(const Group *g, int owner, int reader, uint64_t chunk, uint64_t low);

void stage(Group *g, uint64_t chunk);        /* into this member's block, for its readers */
void stage_others(Group *g, uint64_t chunk); /* the shares that other members reduce */
void keep_own(Group *g);                     /* copy this member's data for itself */
void take(Group *g, uint64_t chunk);         /* copy the data that each sender staged */
void take_others(Group *g, uint64_t chunk);  /* copy the results of other members */

/* Prepare to reduce this member's part of a chunk into an array, and continue: 1 when done, 0 if the caller has to
 * reduce `parts` into `out` and call reduce_on again. */
void begin_reduce(Group *g, int into, uint64_t chunk, Cut cut);
int reduce_on(Group *g);
