/* Finds a call's place in the user's program: the nearest caller outside of this project's files.
 *
 * CPython's public API needs a frame object for each frame on the way, which is slow. Like greenlet
 * and Cython, this reads the interpreter's frames directly if their layout is known.
 */
#define Py_BUILD_CORE 1
#include "calls.h"

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && \
    __has_include("internal/pycore_frame.h")
#include "internal/pycore_frame.h"
#define HAS_FRAMES 1
#endif

/* Return 1 if the file belongs to this project, whose frames are skipped; 0; or -1 with an exception. */
static int is_own(Recorder *ring, PyObject *file) {
    for (int i = 0; i < KNOWN_FILES; i++)
        if (ring->files[i].name == file) return ring->files[i].own;
    PyObject *found = PyObject_GetItem(ring->own_files, file);
    if (!found) return -1;
    int own = found == Py_True;
    Py_DECREF(found); /* True or False */
    int i = ring->next_file;
    ring->next_file = (i + 1) % KNOWN_FILES;
    ring->files[i].own = own;
    Py_XSETREF(ring->files[i].name, Py_NewRef(file));
    return own;
}

#ifdef HAS_FRAMES

typedef struct _PyInterpreterFrame Frame;

#if PY_VERSION_HEX >= 0x030D0000
static Frame *this_frame(void) { return PyThreadState_Get()->current_frame; }
static PyCodeObject *code_of(const Frame *f) { return (PyCodeObject *)f->f_executable; }
static int is_shim(const Frame *f) { return f->owner == FRAME_OWNED_BY_CSTACK; }
static const _Py_CODEUNIT *instruction_of(const Frame *f) { return f->instr_ptr; }
#elif PY_VERSION_HEX >= 0x030C0000
static Frame *this_frame(void) { return PyThreadState_Get()->cframe->current_frame; }
static PyCodeObject *code_of(const Frame *f) { return f->f_code; }
static int is_shim(const Frame *f) { return f->owner == FRAME_OWNED_BY_CSTACK; }
static const _Py_CODEUNIT *instruction_of(const Frame *f) { return f->prev_instr; }
#else
static Frame *this_frame(void) { return PyThreadState_Get()->cframe->current_frame; }
static PyCodeObject *code_of(const Frame *f) { return f->f_code; }
static int is_shim(const Frame *Py_UNUSED(f)) { return 0; }
static const _Py_CODEUNIT *instruction_of(const Frame *f) { return f->prev_instr; }
#endif

/* Return f, or its nearest caller that runs Python code. Frames of calls from C, and frames that have
 * not started, are skipped. */
static Frame *complete(Frame *f) {
    for (; f; f = f->previous)
        if (!is_shim(f) && (f->owner == FRAME_OWNED_BY_GENERATOR ||
                            instruction_of(f) >= _PyCode_CODE(code_of(f)) + code_of(f)->_co_firsttraceable))
            break;
    return f;
}

int find_caller(Recorder *ring, PyCodeObject **code, int *instruction) {
    Frame *frame = complete(this_frame()), *caller;
    if (!frame) {
        PyErr_SetString(PyExc_RuntimeError, "no Python code calls this");
        return -1;
    }
    for (;;) {
        /* For a new file, this may run Python code, which leaves the frames unchanged when it returns. */
        int own = is_own(ring, code_of(frame)->co_filename);
        if (own < 0) return -1;
        if (!own || !(caller = complete(frame->previous))) break;
        frame = caller;
    }
    *code = (PyCodeObject *)Py_NewRef(code_of(frame));
    *instruction = (int)(instruction_of(frame) - _PyCode_CODE(*code)) * (int)sizeof(_Py_CODEUNIT);
    return 0;
}

#else

int find_caller(Recorder *ring, PyCodeObject **code, int *instruction) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (!frame) {
        PyErr_SetString(PyExc_RuntimeError, "no Python code calls this");
        return -1;
    }
    Py_INCREF(frame);
    *code = PyFrame_GetCode(frame);
    int own;
    while ((own = is_own(ring, (*code)->co_filename)) > 0) {
        PyFrameObject *caller = PyFrame_GetBack(frame);
        if (!caller) break;
        Py_SETREF(frame, caller);
        Py_SETREF(*code, PyFrame_GetCode(frame));
    }
    if (own < 0)
        Py_CLEAR(*code);
    else
        *instruction = PyFrame_GetLasti(frame);
    Py_DECREF(frame);
    return own < 0 ? -1 : 0;
}

#endif
