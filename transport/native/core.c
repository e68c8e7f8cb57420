/* The small call, compiled: what Python does in some 700 steps for an all_reduce of a few kilobytes
 * among ranks that share memory, on the same state, with the same bytes in the same places and the
 * same checks. It takes the usual case only; whatever is unusual is left to Python, untouched.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <linux/futex.h>
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

#define STEP (UINT64_C(1) << 24)
#define FIRST 1
#define SLOTS 4
#define HEADER_BYTES 32
#define MOST 64
#define NO_ROOT (-1)
#define LONG_BYTES 4096
enum { BARRIER = 1, ALL_REDUCE = 3 };

/* As in transport/shm/patience.py; a look takes a few nanoseconds here. */
#define MOST_SPINS 1000
#define HELD_SPINS 200
#define FEWEST_SPINS 50
#define YIELD_SECONDS 500e-6
#define YIELDS_PER_LOOK 8
#define FEW_YIELDS 2

typedef _Atomic uint64_t Word;

static double monotonic(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ------------------------------------------------------------------ Progress: a board's numbers */

typedef struct {
    PyObject_HEAD
    unsigned long long number, base, floor, busy;
    unsigned int unchecked; /* cards that are still to be compared */
} Progress;

static PyMemberDef progress_members[] = {
    {"number", T_ULONGLONG, offsetof(Progress, number), 0, NULL},
    {"base", T_ULONGLONG, offsetof(Progress, base), 0, NULL},
    {"floor", T_ULONGLONG, offsetof(Progress, floor), 0, NULL},
    {"busy", T_ULONGLONG, offsetof(Progress, busy), 0, NULL},
    {"unchecked", T_UINT, offsetof(Progress, unchecked), 0, NULL},
    {NULL}};

static void progress_dealloc(Progress *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyType_Slot progress_slots[] = {{Py_tp_new, PyType_GenericNew},
                                       {Py_tp_dealloc, progress_dealloc},
                                       {Py_tp_members, progress_members},
                                       {0, NULL}};
static PyType_Spec progress_spec = {"transport.native._core.Progress", sizeof(Progress), 0, Py_TPFLAGS_DEFAULT,
                                   progress_slots};

/* ------------------------------------------------------------------ Order: a group's numbers */

typedef struct {
    PyObject_HEAD
    unsigned long long sequence;
    unsigned short history;
} Order;

static PyMemberDef order_members[] = {
    {"sequence", T_ULONGLONG, offsetof(Order, sequence), 0, NULL},
    {"history", T_USHORT, offsetof(Order, history), 0, NULL},
    {NULL}};

static void order_dealloc(Order *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyType_Slot order_slots[] = {{Py_tp_new, PyType_GenericNew},
                                       {Py_tp_dealloc, order_dealloc},
                                       {Py_tp_members, order_members},
                                       {0, NULL}};
static PyType_Spec order_spec = {"transport.native._core.Order", sizeof(Order), 0, Py_TPFLAGS_DEFAULT,
                                   order_slots};

/* ------------------------------------------------------------------ Fields: a call's record */

typedef struct {
    PyObject_HEAD
    PyObject *packed, *waiting_for, *completion, *error, *group, *named, *code;
    double issued, started, ended, seconds;
    long long nbytes;
    int peer, instruction;
    char sync;
} Fields;

static PyMemberDef fields_members[] = {
    {"packed", T_OBJECT_EX, offsetof(Fields, packed), 0, NULL},
    {"waiting_for", T_OBJECT_EX, offsetof(Fields, waiting_for), 0, NULL},
    {"completion", T_OBJECT_EX, offsetof(Fields, completion), 0, NULL},
    {"error", T_OBJECT_EX, offsetof(Fields, error), 0, NULL},
    {"group", T_OBJECT_EX, offsetof(Fields, group), 0, NULL},
    {"named", T_OBJECT_EX, offsetof(Fields, named), 0, NULL},
    {"code", T_OBJECT_EX, offsetof(Fields, code), 0, NULL},
    {"issued", T_DOUBLE, offsetof(Fields, issued), 0, NULL},
    {"started", T_DOUBLE, offsetof(Fields, started), 0, NULL},
    {"ended", T_DOUBLE, offsetof(Fields, ended), 0, NULL},
    {"seconds", T_DOUBLE, offsetof(Fields, seconds), 0, NULL},
    {"nbytes", T_LONGLONG, offsetof(Fields, nbytes), 0, NULL},
    {"peer", T_INT, offsetof(Fields, peer), 0, NULL},
    {"instruction", T_INT, offsetof(Fields, instruction), 0, NULL},
    {"sync", T_BOOL, offsetof(Fields, sync), 0, NULL},
    {NULL}};

static int fields_traverse(Fields *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->waiting_for);
    Py_VISIT(self->completion);
    Py_VISIT(self->error);
    Py_VISIT(self->group);
    Py_VISIT(self->named);
    Py_VISIT(self->code);
    return 0;
}

static int fields_clear(Fields *self) {
    Py_CLEAR(self->packed);
    Py_CLEAR(self->waiting_for);
    Py_CLEAR(self->completion);
    Py_CLEAR(self->error);
    Py_CLEAR(self->group);
    Py_CLEAR(self->named);
    Py_CLEAR(self->code);
    return 0;
}

static void fields_dealloc(Fields *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fields_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int fields_init(Fields *self, PyObject *args, PyObject *kwargs) {
    PyObject *packed, *group, *named, *code;
    int sync;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "CallFields takes no arguments by name");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "SpOLidOOi", &packed, &sync, &group, &self->nbytes, &self->peer,
                          &self->seconds, &named, &code, &self->instruction))
        return -1;
    self->sync = (char)sync;
    Py_XSETREF(self->packed, Py_NewRef(packed));
    Py_XSETREF(self->group, Py_NewRef(group));
    Py_XSETREF(self->named, Py_NewRef(named));
    Py_XSETREF(self->code, Py_NewRef(code));
    Py_XSETREF(self->waiting_for, Py_NewRef(Py_None));
    Py_XSETREF(self->completion, Py_NewRef(Py_None));
    Py_XSETREF(self->error, Py_NewRef(Py_None));
    self->issued = monotonic();
    self->started = self->ended = 0;
    return 0;
}

static PyType_Slot fields_slots[] = {{Py_tp_init, fields_init},
                                     {Py_tp_new, PyType_GenericNew},
                                     {Py_tp_dealloc, fields_dealloc},
                                     {Py_tp_traverse, fields_traverse},
                                     {Py_tp_clear, fields_clear},
                                     {Py_tp_members, fields_members},
                                     {0, NULL}};
static PyType_Spec fields_spec = {
    "transport.native._core.CallFields", sizeof(Fields), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, fields_slots};

/* ------------------------------------------------------------------ the header (transport/call.py) */

#pragma pack(push, 1)
typedef struct {
    uint64_t sequence, elements;
    int32_t root;
    uint16_t kind, dtype;
    uint8_t op, flags;
    uint16_t history;
    uint32_t extra;
} Header;
#pragma pack(pop)

static uint32_t crc_table[256];

static void make_crc_table(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        crc_table[n] = c;
    }
}

static uint32_t crc32_of(const unsigned char *data, size_t size) {
    uint32_t c = 0xFFFFFFFFu;
    while (size--) c = crc_table[(c ^ *data++) & 0xFF] ^ (c >> 8);
    return c ^ 0xFFFFFFFFu;
}

/* ------------------------------------------------------------------ what is reduced */

typedef void (*Loop)(void *out, const void *left, const void *right, Py_ssize_t n);

/* Integers wrap as NumPy's do: computed without sign. Floats have no MIN and MAX here, because which
 * of two NaNs comes out is NumPy's own affair. out may be left or right, but does not overlap them
 * otherwise. */
#define LOOP(NAME, T, U, EXPR)                                                              \
    static void NAME(void *out, const void *left, const void *right, Py_ssize_t n) {        \
        T *o = out;                                                                         \
        const T *a = left, *b = right;                                                      \
        _Pragma("GCC ivdep")                                                                \
        for (Py_ssize_t i = 0; i < n; i++) o[i] = (T)(EXPR);                                \
    }
#define INTEGERS(SUFFIX, T, U)                                                              \
    LOOP(sum_##SUFFIX, T, U, (U)a[i] + (U)b[i])                                             \
    LOOP(product_##SUFFIX, T, U, (U)a[i] * (U)b[i])                                         \
    LOOP(min_##SUFFIX, T, U, a[i] < b[i] ? a[i] : b[i])                                     \
    LOOP(max_##SUFFIX, T, U, a[i] > b[i] ? a[i] : b[i])
INTEGERS(i4, int32_t, uint32_t)
INTEGERS(u4, uint32_t, uint32_t)
INTEGERS(i8, int64_t, uint64_t)
INTEGERS(u8, uint64_t, uint64_t)
#define FLOATS(SUFFIX, T)                                                                   \
    LOOP(sum_##SUFFIX, T, T, a[i] + b[i])                                                   \
    LOOP(product_##SUFFIX, T, T, a[i] * b[i])
FLOATS(f4, float)
FLOATS(f8, double)

enum { SUM = 1, AVG = 2, PRODUCT = 3, MIN = 4, MAX = 5 };

typedef struct {
    char format;
    uint16_t dtype;
    uint8_t op, size;
    Loop loop;
} Entry;

#define ROWS(F, CODE, SIZE, S)                                                              \
    {F, CODE, SUM, SIZE, sum_##S}, {F, CODE, PRODUCT, SIZE, product_##S},                   \
    {F, CODE, MIN, SIZE, min_##S}, {F, CODE, MAX, SIZE, max_##S}
static const Entry entries[] = {
    {'f', 11, SUM, 4, sum_f4}, {'f', 11, AVG, 4, sum_f4}, {'f', 11, PRODUCT, 4, product_f4},
    {'d', 12, SUM, 8, sum_f8}, {'d', 12, AVG, 8, sum_f8}, {'d', 12, PRODUCT, 8, product_f8},
    ROWS('i', 6, 4, i4), ROWS('I', 7, 4, u4), ROWS('l', 8, 8, i8), ROWS('L', 9, 8, u8),
};

static const Entry *find_entry(const char *format, long op) {
    if (!format || !format[0] || format[1]) return NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (entries[i].format == format[0] && entries[i].op == op) return &entries[i];
    return NULL;
}

/* ------------------------------------------------------------------ Shortcut */

typedef struct {
    PyObject_HEAD
    Progress *progress;
    Order *order;
    Py_buffer memory; /* of the board's segment, which stays mapped as long as this lives */
    int rank, size, spins, most_spins;
    char checked; /* 0: neither recorded nor compared, to measure what that costs */
    Py_ssize_t direct;
    uint64_t sleepers, counters[MOST], cards[MOST][SLOTS], blocks[MOST][SLOTS];
    /* What Python's way looks at, and where it keeps its records. */
    PyObject *id, *resume, *recorder, *record_type, *append, *own_files, *naming, *observers, *log_cache;
    PyObject *locked, *queue, *acquire, *release, *lane;
} Shortcut;

/* Interned once for the module. */
static PyObject *str_now, *str_followers, *str_annotate, *str_draining, *str_notify, *debug_level;
static PyTypeObject *progress_type, *order_type, *fields_type;

static inline Word *word(Shortcut *s, uint64_t offset) {
    return (Word *)((char *)s->memory.buf + offset);
}

static inline char *bytes_at(Shortcut *s, uint64_t offset) { return (char *)s->memory.buf + offset; }

static int all_at(Shortcut *s, uint64_t turn) {
    for (int r = 0; r < s->size; r++)
        if (r != s->rank &&
            atomic_load_explicit(word(s, s->counters[r]), memory_order_acquire) < turn)
            return 0;
    return 1;
}

static int spin(Shortcut *s, uint64_t turn, int spins) {
    for (int i = 0; i < spins; i++) {
        PAUSE();
        if (all_at(s, turn)) return 1;
    }
    return 0;
}

/* Wait as Patience does, but all the while that counts without the interpreter's lock. 0: it is worth
 * to sleep, which is for Python. */
static int await_all(Shortcut *s, uint64_t turn) {
    if (all_at(s, turn)) return 1;
    /* A thread that computes may keep the lock for milliseconds, once it has it: not for the few
     * microseconds that most waits take. */
    int spins = s->spins, held = spins < HELD_SPINS ? spins : HELD_SPINS;
    if (spin(s, turn, held)) return 1;
    PyThreadState *state = PyEval_SaveThread();
    int come = spin(s, turn, spins - held);
    if (!come) {
        double give_up = monotonic() + YIELD_SECONDS;
        long yields = 0;
        do {
            for (int i = 0; i < YIELDS_PER_LOOK && !come; i++) {
                sched_yield();
                yields++;
                come = all_at(s, turn);
            }
        } while (!come && monotonic() < give_up);
        /* What came after so few yields was done by somebody who waited for this very core. */
        if (come) s->spins = yields <= FEW_YIELDS ? FEWEST_SPINS : s->most_spins;
        if (s->spins > s->most_spins) s->spins = s->most_spins;
    }
    PyEval_RestoreThread(state);
    return come;
}

/* memcpy, but for what makes it slow on some processors: see transport/shm/copying.py. */
static void stage(char *into, const char *from, size_t size) {
    size_t done = 0;
#if defined(__x86_64__)
    if (size >= LONG_BYTES)
        for (; done + 64 <= size; done += 64)
            for (size_t i = 0; i < 64; i += 16)
                _mm_storeu_si128((__m128i *)(into + done + i),
                                 _mm_loadu_si128((const __m128i *)(from + done + i)));
#endif
    memcpy(into + done, from + done, size - done);
}

static void publish(Shortcut *s, uint64_t turn) {
    /* A full fence: who sleeps is seen, or sees the counter. */
    atomic_store_explicit(word(s, s->counters[s->rank]), turn, memory_order_seq_cst);
    for (int i = 0; i < (s->size + 7) / 8; i++)
        if (atomic_load_explicit(word(s, s->sleepers + 8 * (uint64_t)i), memory_order_seq_cst)) {
            syscall(SYS_futex, word(s, s->counters[s->rank]), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
            return;
        }
}

/* Whether a call may begin: Board.begin without its waits. */
static int may_begin(Shortcut *s) {
    Progress *p = s->progress;
    if (p->unchecked) return 0;
    unsigned long long need = p->base + FIRST > STEP ? p->base + FIRST - STEP : 0;
    if (p->busy > need) need = p->busy;
    if (p->floor < need) {
        if (!all_at(s, need)) return 0;
        p->floor = need;
    }
    return 1;
}

/* Whether nobody looks on: 1, 0, or -1 with an exception. */
static int is_unwatched(Shortcut *s) {
    if (PyDict_GET_SIZE(s->observers)) return 0;
    if (PyDict_GetItemWithError(s->log_cache, debug_level) != Py_False) return PyErr_Occurred() ? -1 : 0;
    PyObject *value = PyObject_GetAttr(s->recorder, str_followers);
    if (!value) return -1;
    int none = PyTuple_Check(value) && PyTuple_GET_SIZE(value) == 0;
    Py_DECREF(value);
    if (!none) return 0;
    value = PyObject_GetAttr(s->recorder, str_annotate);
    if (!value) return -1;
    none = value == Py_None;
    Py_DECREF(value);
    return none;
}

/* Take the group's turn if nobody has it or waits for it: 1, 0, or -1 with an exception. Nothing
 * between here and the record gives up the interpreter's lock, so the order of calls is kept. */
static int take_turn(Shortcut *s) {
    PyObject *value = PyObject_CallNoArgs(s->locked);
    if (!value) return -1;
    int free = value == Py_False;
    Py_DECREF(value);
    if (!free) return 0;
    Py_ssize_t queued = PyObject_Size(s->queue);
    if (queued) return queued < 0 ? -1 : 0;
    value = PyObject_CallOneArg(s->acquire, Py_False);
    if (!value) return -1;
    int taken = value == Py_True;
    Py_DECREF(value);
    return taken;
}

static int leave_turn(Shortcut *s) {
    PyObject *value = PyObject_CallNoArgs(s->release);
    if (!value) return -1;
    Py_DECREF(value);
    value = PyObject_GetAttr(s->lane, str_draining);
    if (!value) return -1;
    int draining = PyObject_IsTrue(value);
    Py_DECREF(value);
    if (draining <= 0) return draining;
    value = PyObject_CallMethodNoArgs(s->lane, str_notify);
    Py_XDECREF(value);
    return value ? 0 : -1;
}

/* Give the turn back, and return result, or NULL with the exception that there was. */
static PyObject *leave_with(Shortcut *s, PyObject *result) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (leave_turn(s) < 0) {
        Py_CLEAR(result);
        if (type) PyErr_Clear();
    }
    if (type) PyErr_Restore(type, value, trace);
    return result;
}

/* FlightRecorder.open: of the nearest caller that is none of this project's files. */
static Fields *open_record(Shortcut *s, const Header *header, long long nbytes, double seconds) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (!frame) {
        PyErr_SetString(PyExc_RuntimeError, "no Python code calls this");
        return NULL;
    }
    Py_INCREF(frame);
    PyCodeObject *code = PyFrame_GetCode(frame);
    Fields *record = NULL;
    for (;;) {
        PyObject *own = PyObject_GetItem(s->own_files, code->co_filename);
        if (!own) goto done;
        PyFrameObject *caller = own == Py_True ? PyFrame_GetBack(frame) : NULL;
        Py_DECREF(own);
        if (!caller) break;
        Py_SETREF(frame, caller);
        Py_SETREF(code, PyFrame_GetCode(frame));
    }
    PyObject *named = PyObject_GetAttr(s->naming, str_now);
    if (!named) goto done;
    PyTypeObject *type = (PyTypeObject *)s->record_type;
    record = (Fields *)type->tp_alloc(type, 0);
    if (!record) {
        Py_DECREF(named);
        goto done;
    }
    record->named = named;
    record->packed = PyBytes_FromStringAndSize((const char *)header, HEADER_BYTES);
    record->code = Py_NewRef(code);
    record->instruction = PyFrame_GetLasti(frame);
    record->group = Py_NewRef(s->id);
    record->waiting_for = Py_NewRef(Py_None);
    record->completion = Py_NewRef(Py_None);
    record->error = Py_NewRef(Py_None);
    record->nbytes = nbytes;
    record->peer = -1;
    record->sync = 1;
    record->seconds = seconds;
    record->issued = record->started = monotonic();
    PyObject *appended = record->packed ? PyObject_CallOneArg(s->append, (PyObject *)record) : NULL;
    if (!appended) Py_CLEAR(record);
    Py_XDECREF(appended);
done:
    Py_DECREF(frame);
    Py_DECREF(code);
    return record;
}

/* Make a call whose turn has been taken, up to where all members have met in it. 1: they have, and
 * have the same card; 0: Python goes on with the record. */
static int meet(Shortcut *s, const Header *header, const void *data, Py_ssize_t nbytes) {
    Progress *p = s->progress;
    uint64_t base = p->base += STEP;
    int slot = (int)(++p->number % SLOTS);
    memcpy(bytes_at(s, s->cards[s->rank][slot]), header, HEADER_BYTES);
    if (nbytes) stage(bytes_at(s, s->blocks[s->rank][slot]), data, (size_t)nbytes);
    publish(s, base + FIRST);
    while (!await_all(s, base + FIRST))
        if (s->checked) return 0;
    p->floor = base + FIRST;
    if (!s->checked) return 1;
    for (int r = 0; r < s->size; r++)
        if (r != s->rank && memcmp(bytes_at(s, s->cards[r][slot]), header, HEADER_BYTES)) return 0;
    return 1;
}

/* Begin a call of this group if that is as usual: 1, with its record; 0: it is left to Python; -1:
 * there is an exception. */
static int begin(Shortcut *s, Header *header, long long nbytes, double seconds, Fields **record) {
    int usual = is_unwatched(s);
    if (usual > 0 && !may_begin(s)) usual = 0;
    if (usual > 0) usual = take_turn(s);
    if (usual <= 0) return usual;
    Order *o = s->order;
    header->sequence = ++o->sequence;
    *record = NULL;
    if (!s->checked) return 1;
    header->history = o->history;
    o->history = (unsigned short)crc32_of((const unsigned char *)header, HEADER_BYTES);
    /* From here on other threads may run: their calls come after this one. */
    *record = open_record(s, header, nbytes, seconds);
    if (*record) return 1;
    leave_with(s, NULL);
    return -1;
}

/* End a call that went well, and return what it returns. */
static PyObject *end(Shortcut *s, Fields *record, PyObject *result) {
    if (record) record->ended = monotonic();
    Py_XDECREF(record);
    return leave_with(s, Py_NewRef(result));
}

/* Let Python wait for the others, or say what went wrong. Called from here, so that the turn is given
 * back also where a signal ends it before its first line. */
static PyObject *resume(Shortcut *s, Fields *record, PyObject *array, PyObject *op) {
    PyObject *result =
        PyObject_CallFunctionObjArgs(s->resume, (PyObject *)record, array, op, NULL);
    Py_DECREF(record);
    return leave_with(s, result);
}

static PyObject *left_to_python(int begun) {
    if (begun < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *shortcut_all_reduce(Shortcut *s, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "expected an array, an op, its code and seconds");
        return NULL;
    }
    long op = PyLong_AsLong(args[2]);
    double seconds = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)) {
        PyErr_Clear(); /* read-only, with gaps, no buffer at all: Python's way has words for it */
        Py_RETURN_NONE;
    }
    const Entry *entry = find_entry(view.format, op);
    if (!entry || view.len > s->direct || view.len == 0 || view.itemsize != entry->size ||
        (uintptr_t)view.buf % entry->size) {
        PyBuffer_Release(&view);
        Py_RETURN_NONE;
    }
    Py_ssize_t n = view.len / entry->size;
    Header header = {.elements = (uint64_t)n, .root = NO_ROOT, .kind = ALL_REDUCE,
                     .dtype = entry->dtype, .op = entry->op};
    Fields *record;
    int begun = begin(s, &header, view.len, seconds, &record);
    if (begun <= 0) {
        PyBuffer_Release(&view);
        return left_to_python(begun);
    }
    if (!meet(s, &header, view.buf, view.len)) {
        PyBuffer_Release(&view);
        return resume(s, record, args[0], args[1]);
    }
    int slot = (int)(s->progress->number % SLOTS);
    /* In the order of the ranks; what is near this core is read from the array itself. */
    const void *left = s->rank == 0 ? view.buf : bytes_at(s, s->blocks[0][slot]);
    const void *right = s->rank == 1 ? view.buf : bytes_at(s, s->blocks[1][slot]);
    entry->loop(view.buf, left, right, n);
    for (int r = 2; r < s->size; r++)
        entry->loop(view.buf, view.buf, bytes_at(s, s->blocks[r][slot]), n);
    if (op == AVG) {
        if (entry->size == 4) {
            float *x = view.buf, by = (float)s->size;
            for (Py_ssize_t i = 0; i < n; i++) x[i] /= by;
        } else {
            double *x = view.buf, by = (double)s->size;
            for (Py_ssize_t i = 0; i < n; i++) x[i] /= by;
        }
    }
    PyBuffer_Release(&view);
    return end(s, record, args[0]);
}

static PyObject *shortcut_barrier(Shortcut *s, PyObject *arg) {
    double seconds = PyFloat_AsDouble(arg);
    if (PyErr_Occurred()) return NULL;
    Header header = {.root = NO_ROOT, .kind = BARRIER};
    Fields *record;
    int begun = begin(s, &header, 0, seconds, &record);
    if (begun <= 0) return left_to_python(begun);
    if (!meet(s, &header, NULL, 0)) return resume(s, record, Py_None, Py_None);
    return end(s, record, Py_True);
}

static int offsets_from(PyObject *list, uint64_t *into, Py_ssize_t count) {
    PyObject *fast = PySequence_Fast(list, "expected a list of offsets");
    if (!fast) return -1;
    int bad = PySequence_Fast_GET_SIZE(fast) != count;
    for (Py_ssize_t i = 0; !bad && i < count; i++) {
        into[i] = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(fast, i));
        bad = PyErr_Occurred() != NULL;
    }
    Py_DECREF(fast);
    if (bad && !PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "expected %zd offsets", count);
    return bad ? -1 : 0;
}

static int slots_from(PyObject *rows, uint64_t into[][SLOTS], int size) {
    for (int r = 0; r < size; r++) {
        PyObject *row = PySequence_GetItem(rows, r);
        int bad = !row || offsets_from(row, into[r], SLOTS);
        Py_XDECREF(row);
        if (bad) return -1;
    }
    return 0;
}

static PyObject *keep(PyObject *owner, const char *name) {
    return owner ? PyObject_GetAttrString(owner, name) : NULL;
}

/* Shortcut(board, group): board is (progress, memory, rank, size, counters, cards, blocks, sleepers,
 * direct, spins), group is (id, resume, order, lock, lane, queue, turn, recorder, record type, ring, own files,
 * naming, observers, cache of the log's levels). */
static int shortcut_init(Shortcut *s, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *progress, *memory, *counters, *cards, *blocks, *lock, *queue, *turn, *ring, *order;
    PyObject *id, *resume, *lane, *recorder, *record_type, *own_files, *naming, *observers;
    PyObject *log_cache;
    unsigned long long sleepers;
    if (s->progress) {
        PyErr_SetString(PyExc_RuntimeError, "a Shortcut is made once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "(O!OiiOOOKnp)(UOO!OOOOOO!OO!OO!O!)", progress_type, &progress, &memory,
                          &s->rank, &s->size, &counters, &cards, &blocks, &sleepers, &s->direct,
                          &s->most_spins, &id, &resume, order_type, &order, &lock, &lane, &queue, &turn,
                          &recorder, &PyType_Type, &record_type, &ring, &PyDict_Type, &own_files,
                          &naming, &PyDict_Type, &observers, &PyDict_Type, &log_cache))
        return -1;
    if (s->size < 2 || s->size > MOST || s->rank < 0 || s->rank >= s->size) {
        PyErr_Format(PyExc_ValueError, "expected 2 to %d members, got %d", MOST, s->size);
        return -1;
    }
    if (!PyType_IsSubtype((PyTypeObject *)record_type, fields_type)) {
        PyErr_SetString(PyExc_TypeError, "records must be CallFields");
        return -1;
    }
    s->most_spins = s->spins = s->most_spins ? MOST_SPINS : 0;
    s->checked = 1;
    s->sleepers = sleepers;
    if (offsets_from(counters, s->counters, s->size) || slots_from(cards, s->cards, s->size) ||
        slots_from(blocks, s->blocks, s->size))
        return -1;
    if (PyObject_GetBuffer(memory, &s->memory, PyBUF_WRITABLE)) return -1;
    s->progress = (Progress *)Py_NewRef(progress);
    s->order = (Order *)Py_NewRef(order);
    s->id = Py_NewRef(id);
    s->resume = Py_NewRef(resume);
    s->lane = Py_NewRef(lane);
    s->queue = Py_NewRef(queue);
    s->recorder = Py_NewRef(recorder);
    s->record_type = Py_NewRef(record_type);
    s->own_files = Py_NewRef(own_files);
    s->naming = Py_NewRef(naming);
    s->observers = Py_NewRef(observers);
    s->log_cache = Py_NewRef(log_cache);
    s->locked = keep(lock, "locked");
    s->acquire = keep(turn, "acquire");
    s->release = keep(turn, "release");
    s->append = keep(ring, "append");
    return s->locked && s->acquire && s->release && s->append ? 0 : -1;
}

#define EACH_OBJECT(DO)                                                                     \
    DO(s->id) DO(s->resume) DO(s->recorder) DO(s->record_type) DO(s->append) DO(s->own_files)          \
    DO(s->naming) DO(s->observers) DO(s->log_cache) DO(s->locked) DO(s->queue)              \
    DO(s->acquire) DO(s->release) DO(s->lane)

static int shortcut_traverse(Shortcut *s, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(s));
#define DO(X) Py_VISIT(X);
    EACH_OBJECT(DO)
#undef DO
    return 0;
}

static int shortcut_clear(Shortcut *s) {
#define DO(X) Py_CLEAR(X);
    EACH_OBJECT(DO)
#undef DO
    Py_CLEAR(s->progress);
    Py_CLEAR(s->order);
    if (s->memory.obj) PyBuffer_Release(&s->memory);
    return 0;
}

static void shortcut_dealloc(Shortcut *s) {
    PyTypeObject *type = Py_TYPE(s);
    PyObject_GC_UnTrack(s);
    shortcut_clear(s);
    type->tp_free((PyObject *)s);
    Py_DECREF(type);
}

static PyMethodDef shortcut_methods[] = {
    {"all_reduce", (PyCFunction)(void (*)(void))shortcut_all_reduce, METH_FASTCALL, NULL},
    {"barrier", (PyCFunction)shortcut_barrier, METH_O, NULL},
    {NULL}};
static PyMemberDef shortcut_members[] = {{"checked", T_BOOL, offsetof(Shortcut, checked), 0, NULL},
                                         {NULL}};
static PyType_Slot shortcut_slots[] = {{Py_tp_init, shortcut_init},
                                       {Py_tp_members, shortcut_members},
                                       {Py_tp_new, PyType_GenericNew},
                                       {Py_tp_dealloc, shortcut_dealloc},
                                       {Py_tp_traverse, shortcut_traverse},
                                       {Py_tp_clear, shortcut_clear},
                                       {Py_tp_methods, shortcut_methods},
                                       {0, NULL}};
static PyType_Spec shortcut_spec = {"transport.native._core.Shortcut", sizeof(Shortcut), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, shortcut_slots};

/* ------------------------------------------------------------------ the module */

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec) {
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(spec);
    if (type && PyModule_AddType(module, type) < 0) Py_CLEAR(type);
    return type;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "transport.native._core", .m_size = -1};

PyMODINIT_FUNC PyInit__core(void) {
#if defined(Py_GIL_DISABLED)
    PyErr_SetString(PyExc_ImportError, "needs the interpreter's lock");
    return NULL;
#endif
    make_crc_table();
    str_now = PyUnicode_InternFromString("now");
    str_followers = PyUnicode_InternFromString("_followers");
    str_annotate = PyUnicode_InternFromString("annotate");
    str_draining = PyUnicode_InternFromString("_draining");
    str_notify = PyUnicode_InternFromString("_notify");
    debug_level = PyLong_FromLong(10);
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    progress_type = add_type(module, &progress_spec);
    order_type = add_type(module, &order_spec);
    fields_type = add_type(module, &fields_spec);
    if (!progress_type || !order_type || !fields_type || !add_type(module, &shortcut_spec)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
