// Calls of the CUDA driver and of cuBLASLt without Python between them: what a launch of a recorded program or of a Plan costs the host.
//
// A Launches object holds kernel launches whose arguments differ from call to call in addresses only; a Product holds a
// matrix product of cuBLASLt with its layouts and its algorithm. Both are called with a stream and addresses, and copy
// what changes to memory of the call, so that threads do not wait for each other. They know no CUDA header: functions
// come as addresses, and structs of the driver are described here as far as they are used.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST_ARGUMENTS 64
#define MOST_BYTES 4096
#define MOST_ADDRESSES 32
#define MAP_BYTES 128  // of a tensor map, as in cuda_driver.py
#define MAP_ALIGNMENT 64

// ------------------------------------------------------------------------------------------------ what both share

typedef struct {
    unsigned x, y, z, threads, threads_y, threads_z, memory;
    void *stream, *attributes;
    unsigned count;
} Settings;  // CUlaunchConfig

static int addresses_of(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, uint64_t *out) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "takes a stream and %zd addresses, got %zd values", wanted - 1, given);
        return -1;
    }
    for (Py_ssize_t i = 0; i < given; i++) {
        out[i] = PyLong_AsUnsignedLongLongMask(args[i]);
        if (out[i] == (uint64_t)-1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

static PyObject *done(int status, PyObject *on_error) {
    if (!status) Py_RETURN_NONE;
    PyObject *raised = PyObject_CallFunction(on_error, "i", status);
    if (raised) {
        Py_DECREF(raised);
        PyErr_Format(PyExc_RuntimeError, "a call of CUDA returned %d", status);
    }
    return NULL;
}

// ------------------------------------------------------------------------------------------------ kernels

typedef struct {
    uint32_t offset, base;
    uint64_t added;
} Moved;  // an argument that is an address: where it is in the block, relative to which address of the call

typedef struct {
    void *kernel;
    Settings settings;
    uint32_t size, arguments, moves, map_count;
    uint8_t *block;
    uint32_t *offsets;
    Moved *moved, *maps;  // addresses; tensor maps, which the driver moves
} Step;

typedef struct {
    PyObject_HEAD vectorcallfunc vectorcall;
    int (*launch)(const Settings *, void *, void **, void **);
    int (*current)(void **);
    int (*replace)(void *, void *);
    PyObject *use_context, *on_error, *owners;
    Py_ssize_t addresses, count;
    Step *steps;
} Launches;

static int run_step(Launches *self, const Step *step, const uint64_t *given) {
    _Alignas(MAP_ALIGNMENT) uint8_t block[MOST_BYTES];
    void *pointers[MOST_ARGUMENTS];
    memcpy(block, step->block, step->size);
    for (uint32_t i = 0; i < step->moves; i++) {
        uint64_t value = given[1 + step->moved[i].base] + step->moved[i].added;
        memcpy(block + step->moved[i].offset, &value, sizeof value);
    }
    for (uint32_t i = 0; i < step->map_count; i++) {
        uint64_t value = given[1 + step->maps[i].base] + step->maps[i].added;
        int status = self->replace(block + step->maps[i].offset, (void *)(uintptr_t)value);
        if (status) return status;
    }
    for (uint32_t i = 0; i < step->arguments; i++) pointers[i] = block + step->offsets[i];
    Settings settings = step->settings;
    settings.stream = (void *)(uintptr_t)given[0];
    return self->launch(&settings, step->kernel, pointers, NULL);
}

static PyObject *launches_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    Launches *self = (Launches *)object;
    uint64_t given[MOST_ADDRESSES + 1];
    void *context = NULL;
    if (addresses_of(args, PyVectorcall_NARGS(count), self->addresses + 1, given)) return NULL;
    if (self->current && (self->current(&context) || !context)) {
        PyObject *used = PyObject_CallNoArgs(self->use_context);
        if (!used) return NULL;
        Py_DECREF(used);
    }
    int status = 0;
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < self->count && !status; i++) status = run_step(self, &self->steps[i], given);
    Py_END_ALLOW_THREADS;
    return done(status, self->on_error);
}

// A tuple of integers as an array; each value is checked to be at most `most`.
static uint32_t *integers(PyObject *tuple, uint32_t *count, unsigned long most) {
    *count = (uint32_t)PyTuple_GET_SIZE(tuple);
    uint32_t *out = PyMem_Malloc((*count + 1) * sizeof *out);
    if (!out) return (uint32_t *)PyErr_NoMemory();
    for (uint32_t i = 0; i < *count; i++) {
        unsigned long value = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(tuple, i));
        if (PyErr_Occurred() || value > most) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%lu is more than %lu", value, most);
            PyMem_Free(out);
            return NULL;
        }
        out[i] = (uint32_t)value;
    }
    return out;
}

// A tuple of (offset, base, added) as an array; each offset is followed by ``bytes`` bytes of the block.
static Moved *read_moved(PyObject *tuple, const Step *step, Py_ssize_t addresses, uint32_t bytes, uint32_t *count) {
    *count = (uint32_t)PyTuple_GET_SIZE(tuple);
    Moved *out = PyMem_Malloc((*count + 1) * sizeof *out);
    if (!out) return (Moved *)PyErr_NoMemory();
    for (uint32_t i = 0; i < *count; i++) {
        Moved *one = &out[i];
        unsigned long long added;
        PyObject *given = PyTuple_GET_ITEM(tuple, i);
        int read = PyTuple_Check(given) && PyArg_ParseTuple(given, "IIK", &one->offset, &one->base, &added);
        one->added = added;
        if (read && (one->offset + (uint64_t)bytes > step->size || one->base >= (uint64_t)addresses)) {
            PyErr_Format(PyExc_ValueError, "no argument at byte %u, or no address %u", one->offset, one->base);
            read = 0;
        }
        if (!read) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a moved argument is a tuple");
            PyMem_Free(out);
            return NULL;
        }
    }
    return out;
}

// (kernel, x, y, z, threads, memory, attributes, their count, block, offsets, moved, maps)
static int read_step(Step *step, PyObject *tuple, Py_ssize_t addresses) {
    unsigned long long kernel, attributes;
    Settings *s = &step->settings;
    PyObject *block, *offsets, *moved, *maps;
    if (!PyArg_ParseTuple(
            tuple, "KIIIIIKIO!O!O!O!", &kernel, &s->x, &s->y, &s->z, &s->threads, &s->memory, &attributes, &s->count,
            &PyBytes_Type, &block, &PyTuple_Type, &offsets, &PyTuple_Type, &moved, &PyTuple_Type, &maps))
        return -1;
    step->kernel = (void *)(uintptr_t)kernel;
    s->attributes = (void *)(uintptr_t)attributes;
    s->threads_y = s->threads_z = 1;
    step->size = (uint32_t)PyBytes_GET_SIZE(block);
    if (PyBytes_GET_SIZE(block) > MOST_BYTES || PyTuple_GET_SIZE(offsets) > MOST_ARGUMENTS) {
        PyErr_Format(PyExc_ValueError, "more than %d arguments or %d bytes of them", MOST_ARGUMENTS, MOST_BYTES);
        return -1;
    }
    step->block = PyMem_Malloc(step->size + 1);
    if (!step->block) return (PyErr_NoMemory(), -1);
    memcpy(step->block, PyBytes_AS_STRING(block), step->size);
    step->offsets = integers(offsets, &step->arguments, step->size);
    if (!step->offsets) return -1;
    step->moved = read_moved(moved, step, addresses, sizeof(uint64_t), &step->moves);
    if (!step->moved) return -1;
    step->maps = read_moved(maps, step, addresses, MAP_BYTES, &step->map_count);
    return step->maps ? 0 : -1;
}

// Launches(launch, current, replace, use_context, on_error, addresses, steps, owners)
static PyObject *launches_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    unsigned long long launch, current, replace;
    PyObject *use_context, *on_error, *steps, *owners;
    Py_ssize_t addresses;
    if (!PyArg_ParseTuple(
            args, "KKKOOnO!O", &launch, &current, &replace, &use_context, &on_error, &addresses, &PyTuple_Type, &steps,
            &owners))
        return NULL;
    if (addresses < 0 || addresses > MOST_ADDRESSES)
        return PyErr_Format(PyExc_ValueError, "from 0 to %d addresses, not %zd", MOST_ADDRESSES, addresses);
    Launches *self = (Launches *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->vectorcall = launches_call;
    self->launch = (int (*)(const Settings *, void *, void **, void **))(uintptr_t)launch;
    self->current = (int (*)(void **))(uintptr_t)current;
    self->replace = (int (*)(void *, void *))(uintptr_t)replace;
    self->use_context = Py_NewRef(use_context);
    self->on_error = Py_NewRef(on_error);
    self->owners = Py_NewRef(owners);
    self->addresses = addresses;
    Py_ssize_t count = PyTuple_GET_SIZE(steps);
    self->steps = PyMem_Calloc(count + 1, sizeof(Step));
    for (Py_ssize_t i = 0; self->steps && i < count; i++) {
        self->count = i + 1;
        PyObject *step = PyTuple_GET_ITEM(steps, i);
        if (!PyTuple_Check(step) || read_step(&self->steps[i], step, addresses)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a step is a tuple");
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static void launches_free(PyObject *object) {
    Launches *self = (Launches *)object;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        PyMem_Free(self->steps[i].block);
        PyMem_Free(self->steps[i].moved);
        PyMem_Free(self->steps[i].maps);
        PyMem_Free(self->steps[i].offsets);
    }
    PyMem_Free(self->steps);
    Py_XDECREF(self->use_context);
    Py_XDECREF(self->on_error);
    Py_XDECREF(self->owners);
    Py_TYPE(object)->tp_free(object);
}

// ------------------------------------------------------------------------------------------------ products

typedef int (*Matmul)(
    void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *, void *, void *,
    void *, const void *, void *, size_t, void *);
typedef int (*SetAttribute)(void *, int, const void *, size_t);

typedef struct {
    PyObject_HEAD vectorcallfunc vectorcall;
    Matmul matmul;
    SetAttribute set;
    void *handle, *description, *a, *b, *c, *d;
    uint8_t algorithm[64];
    size_t workspace;
    int attributes[3];
    int pointers;
    pthread_mutex_t lock;  // of the description, which holds the addresses of scales and bias
    PyObject *on_error, *owners;
} Product;

// (stream, left, right, out, workspace, scales of the left, scales of the right[, bias])
static PyObject *product_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    Product *self = (Product *)object;
    uint64_t given[MOST_ADDRESSES + 1];
    const float one = 1, zero = 0;
    int status = 0;
    if (addresses_of(args, PyVectorcall_NARGS(count), 5 + self->pointers, given)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&self->lock);
    for (int i = 0; i < self->pointers && !status; i++)
        status = self->set(self->description, self->attributes[i], &given[5 + i], sizeof(uint64_t));
    void *out = (void *)(uintptr_t)given[3];
    if (!status)
        status = self->matmul(
            self->handle, self->description, &one, (void *)(uintptr_t)given[1], self->a, (void *)(uintptr_t)given[2],
            self->b, &zero, out, self->c, out, self->d, self->algorithm, (void *)(uintptr_t)given[4], self->workspace,
            (void *)(uintptr_t)given[0]);
    pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS;
    return done(status, self->on_error);
}

// Product(matmul, set, handle, description, a, b, c, d, algorithm, workspace, attributes, on_error, owners)
static PyObject *product_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    unsigned long long matmul, set, handle, description, a, b, c, d;
    const char *algorithm;
    Py_ssize_t size, workspace;
    PyObject *attributes, *on_error, *owners;
    if (!PyArg_ParseTuple(
            args, "KKKKKKKKy#nO!OO", &matmul, &set, &handle, &description, &a, &b, &c, &d, &algorithm, &size, &workspace,
            &PyTuple_Type, &attributes, &on_error, &owners))
        return NULL;
    Py_ssize_t pointers = PyTuple_GET_SIZE(attributes);
    if (size != 64 || workspace < 0 || pointers > 3)
        return PyErr_Format(PyExc_ValueError, "an algorithm of 64 bytes and up to 3 attributes, not %zd and %zd", size, pointers);
    Product *self = (Product *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->vectorcall = product_call;
    self->matmul = (Matmul)(uintptr_t)matmul;
    self->set = (SetAttribute)(uintptr_t)set;
    self->handle = (void *)(uintptr_t)handle, self->description = (void *)(uintptr_t)description;
    self->a = (void *)(uintptr_t)a, self->b = (void *)(uintptr_t)b;
    self->c = (void *)(uintptr_t)c, self->d = (void *)(uintptr_t)d;
    memcpy(self->algorithm, algorithm, 64);
    self->workspace = (size_t)workspace;
    self->pointers = (int)pointers;
    pthread_mutex_init(&self->lock, NULL);
    self->on_error = Py_NewRef(on_error);
    self->owners = Py_NewRef(owners);
    for (int i = 0; i < self->pointers; i++) self->attributes[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(attributes, i));
    if (PyErr_Occurred()) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void product_free(PyObject *object) {
    Product *self = (Product *)object;
    pthread_mutex_destroy(&self->lock);
    Py_XDECREF(self->on_error);
    Py_XDECREF(self->owners);
    Py_TYPE(object)->tp_free(object);
}

// ------------------------------------------------------------------------------------------------ the module

#define CALLABLE(type, name, new, free)                                                                     \
    static PyTypeObject type##Type = {                                                                      \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mxtensor_host_calls." name, .tp_basicsize = sizeof(type), \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, .tp_call = PyVectorcall_Call,          \
        .tp_vectorcall_offset = offsetof(type, vectorcall), .tp_new = new, .tp_dealloc = free}

CALLABLE(Launches, "Launches", launches_new, launches_free);
CALLABLE(Product, "Product", product_new, product_free);

// clear(function, stream, address, count): cuMemsetD32Async with zeros; returns its status
static PyObject *clear(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t given[4];
    if (addresses_of(args, count, 4, given)) return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = ((int (*)(uint64_t, unsigned, size_t, void *))(uintptr_t)given[0])(
        given[2], 0, (size_t)given[3], (void *)(uintptr_t)given[1]);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {{"clear", (PyCFunction)(void (*)(void))clear, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "mxtensor_host_calls", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_mxtensor_host_calls(void) {
    PyObject *made = PyModule_Create(&module);
    if (!made || PyModule_AddType(made, &LaunchesType) || PyModule_AddType(made, &ProductType)) return NULL;
    return made;
}
