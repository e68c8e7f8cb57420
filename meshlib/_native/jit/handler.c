/* The handler that XLA calls through the C API of its FFI, whose header is part of jaxlib. */
#include "program_calls.h"

#if __has_include("xla/ffi/api/c_api.h")
#include "xla/ffi/api/c_api.h"

/* The oldest API version with all features that are used here. XLA refuses handlers of a version later than its own. */
#define MAJOR 0
#define MINOR 1

#define MOST_BUFFERS 64

static XLA_FFI_Error *fail_with(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
    XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = message,
                                      .errc = code};
    return frame->api->XLA_FFI_Error_Create(&args);
}

/* Convert the raised exception to an XLA error with the text "Type: text". */
static XLA_FFI_Error *fail_with_exception(const XLA_FFI_CallFrame *frame) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *name = PyObject_GetAttrString(type, "__name__");
    PyObject *text = name ? PyUnicode_FromFormat("%U: %S", name, value) : NULL;
    const char *message = text ? PyUnicode_AsUTF8(text) : NULL;
    XLA_FFI_Error *error = fail_with(frame, XLA_FFI_Error_Code_INTERNAL, message ? message : "an exception");
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(name);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return error;
}

/* Let Python make the call, or, with `begun`, continue the started call with that header. */
static int call_python(const ProgramCall *call, const Memory *buffers, const Header *begun) {
    int count = call->operands + call->results;
    PyObject *views = PyTuple_New(count), *header, *result = NULL;
    for (int i = 0; views && i < count; i++) {
        static char nothing[1];
        char *data = buffers[i].data ? buffers[i].data : nothing;
        int flags = i < call->operands ? PyBUF_READ : PyBUF_WRITE;
        PyObject *view = PyMemoryView_FromMemory(data, (Py_ssize_t)buffers[i].nbytes, flags);
        if (!view) Py_CLEAR(views);
        else PyTuple_SET_ITEM(views, i, view);
    }
    header = begun ? PyBytes_FromStringAndSize((const char *)begun, HEADER_BYTES) : Py_NewRef(Py_None);
    if (views && header) result = PyObject_CallMethod(call->owner, "make", "OO", header, views);
    Py_XDECREF(header);
    Py_XDECREF(views);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Acquire the GIL. The interpreter would create and free a thread state at each call. XLA's threads call repeatedly, so
 * the first call in a thread keeps the state alive. */
static PyGILState_STATE enter_python(void) {
    static _Thread_local char known;
    PyGILState_STATE state = PyGILState_Ensure();
    if (!known && state == PyGILState_UNLOCKED) PyGILState_Ensure();
    known = 1;
    return state;
}

static uint64_t bytes_of(const XLA_FFI_Buffer *buffer, uint64_t itemsize) {
    for (int64_t i = 0; i < buffer->rank; i++) itemsize *= (uint64_t)buffer->dims[i];
    return itemsize;
}

/* Store the program's buffers except tokens, with their sizes in bytes. Return their number, or -1 if there are too many. */
static int take_buffers(void *const *given, int64_t count, const uint64_t *itemsizes, Memory *buffers) {
    int taken = 0;
    for (int64_t i = 0; i < count; i++) {
        const XLA_FFI_Buffer *buffer = given[i];
        if (buffer->dtype == XLA_FFI_DataType_TOKEN) continue;
        if (taken == MOST_BUFFERS) return -1;
        buffers[taken] = (Memory){buffer->data, bytes_of(buffer, itemsizes[taken])};
        taken++;
    }
    return taken;
}

static XLA_FFI_Error *handle(XLA_FFI_CallFrame *frame) {
    const void *extension = frame->extension_start; /* void, because the type's name differs between versions */
    if (extension && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
        XLA_FFI_Metadata *about = ((const XLA_FFI_Metadata_Extension *)extension)->metadata;
        about->api_version.major_version = MAJOR;
        about->api_version.minor_version = MINOR;
        about->traits = 0;
        return NULL;
    }
    if (frame->attrs.size != 1 || frame->attrs.types[0] != XLA_FFI_AttrType_SCALAR)
        return fail_with(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "meshlib: expected the address of a call");
    const XLA_FFI_Scalar *address = frame->attrs.attrs[0];
    ProgramCall *call = (ProgramCall *)*(const uintptr_t *)address->value; /* XLA holds a reference while a program runs. */
    Memory buffers[MOST_BUFFERS];
    int operands = take_buffers(frame->args.args, frame->args.size, call->itemsizes, buffers);
    int results = operands == call->operands ? take_buffers(frame->rets.rets, frame->rets.size,
                                                            call->itemsizes + operands, buffers + operands)
                                             : -1;
    if (results != call->results)
        return fail_with(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "meshlib: the call has different operands or results");
    Header header;
    Outcome outcome = make_call(call, buffers, &header);
    if (outcome == MADE) return NULL;
    PyGILState_STATE state = enter_python();
    XLA_FFI_Error *error = NULL;
    if (call_python(call, buffers, outcome == BEGUN ? &header : NULL) < 0) error = fail_with_exception(frame);
    PyGILState_Release(state);
    return error;
}

int add_handler(PyObject *module) {
    return PyModule_AddObject(module, "xla_handler", PyCapsule_New((void *)(uintptr_t)handle, NULL, NULL));
}

#else

int add_handler(PyObject *module) { return PyModule_AddObjectRef(module, "xla_handler", Py_None); }

#endif
