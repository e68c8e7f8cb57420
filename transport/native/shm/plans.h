/* Plans of collectives, as Python makes them (transport/shm/collectives/steps.py has what all this means), and
 * calls that are made by them. */
#pragma once
#include "core.h"
#include "memory/gaps.h"
#include "memory/staging.h"

enum { NOTE, STAGE, PUBLISH, KEEP, MEET, SURVEY, LOOP, END, REACH, TAKE, FOLD, CHECK_LATER, CLOSE, AWAIT, OPS };
enum { WHOLE, BEFORE, OWN, AFTER, CUTS };
#define ALL (-1)
#define NOTHING (-1)

typedef struct {
    int32_t op, lap, peer, number, first, count;
} Step;

typedef struct {
    int32_t peer, array, share, cut;
} Part;

typedef struct {
    int32_t steps, parts, arrays, read_only, capacity, wide, places_from, spread, known;
} Head;

typedef struct {
    PyObject *packed; /* which all else points into; NULL: there is no plan yet */
    const Head *head;
    const int32_t *sends, *expects; /* by member */
    const Step *steps;
    const Part *parts, *keep; /* keep: the two of KEEP, or NULL */
    int sources;              /* how many members it sends to */
    int width;                /* the most parts that a step has */
    int along;                /* what is kept is what is staged, for all */
} Plan;

/* A segment of symmetric memory: a part for each member, one after the other. */
typedef struct {
    uint64_t number, address, part;
} Mapped;

/* The plans of a member of a group. */
typedef struct {
    PyObject_HEAD
    Board *board;
    PyObject *python; /* the transport.shm.board.board.Board */
    PyObject *make;   /* gives a plan by its number */
    Plan *plans;
    long count; /* of plans there may be */
    Mapped *mapped;
    Py_ssize_t mappings;
    Staging staging;
} Plans;

#define MOST_ARRAYS (2 * MOST)

/* A call under way. Sizes are in bytes. */
typedef struct {
    Run run;
    Plans *plans;
    const Plan *plan;
    const Entry *entry; /* how it reduces; NULL: it copies */
    Way copy;           /* to results */
    uint64_t per_lap, laps, moved;
    int in_place; /* this member's arrays are read where they are */
    int many;     /* laps enough for the blocks to be closed */
    int along;    /* what is kept is copied with what is staged */
    int later;    /* cards are to be compared in a later call */
    int arrays;
    Gaps *gaps; /* of each array; NULL: each lies in one piece */
    uint64_t where[MOST_ARRAYS];
    char *places[MOST]; /* where members' data for this one is read in place; NULL: it is staged */
    Py_buffer views[MOST_ARRAYS];
} Passage;

/* Work out the laps of a passage whose arrays and plan are known. */
void lay_out(Passage *p);

/* Run the steps, without the interpreter's lock: -1 with an exception, else where Python goes on, or 0 if
 * all is done. */
int run_plan(Passage *p);

extern PyType_Spec plans_spec;
int init_plans(void);
