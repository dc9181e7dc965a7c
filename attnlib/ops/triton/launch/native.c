/* A kernel launch with most arguments in place: `launch(stream, *changing)`. `sequence.c`, which is
 * compiled behind this file as one module, runs all launches of a call.
 *
 * Triton's own launcher receives every argument as a Python object at each call, which costs about
 * a microsecond for the 40 to 60 arguments of an attention kernel. This one keeps the arguments of
 * a batch as machine words and converts only those that change from layer to layer.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

#define MAX_ARGUMENTS 128
#define MAX_MAPS 4

/* How an argument is passed to the kernel. */
enum {
  POINTER = 'p',    /* an address as an int, or None */
  INT32 = 'i',      /* also for unsigned values */
  INT64 = 'l',
  FLOAT32 = 'f',
  FLOAT64 = 'd',
  TENSOR_MAP = 't', /* Triton's PyCUtensorMap */
  CONSTANT = 'x',   /* compiled into the kernel: not passed */
};

typedef CUresult (*LaunchFunction)(const CUlaunchConfig *, CUfunction, void **, void **);
typedef CUresult (*GetContext)(CUcontext *);
typedef CUresult (*SetContext)(CUcontext);

typedef struct {
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  LaunchFunction launch;
  SetContext set_context;
  CUcontext context;
  CUfunction function;
  CUlaunchConfig config;
  CUlaunchAttribute attributes[2];
  Py_ssize_t num_arguments, num_slots;
  uint8_t kinds[MAX_ARGUMENTS];
  uint8_t slots[MAX_ARGUMENTS]; /* the argument that each changing value replaces */
  uint64_t values[MAX_ARGUMENTS];
  PyObject *fixed; /* keeps the objects behind `values` alive */
} Launch;

static PyTypeObject *tensor_map_type;

static int convert(PyObject *value, uint8_t kind, uint64_t *word) {
  *word = 0;
  switch (kind) {
  case POINTER:
    if (value != Py_None) {
      *word = PyLong_AsUnsignedLongLong(value);
      return !(*word == (uint64_t)-1 && PyErr_Occurred());
    }
    return 1;
  case INT32:
  case INT64: {
    long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred())
      return 0;
    if (kind == INT32 && (number < INT32_MIN || number > UINT32_MAX)) {
      PyErr_Format(PyExc_OverflowError, "%lld does not fit into a 32-bit argument", number);
      return 0;
    }
    *word = (uint64_t)number;
    return 1;
  }
  case FLOAT32:
  case FLOAT64: {
    double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred())
      return 0;
    if (kind == FLOAT32) {
      float narrow = (float)number;
      memcpy(word, &narrow, sizeof narrow);
    } else {
      memcpy(word, &number, sizeof number);
    }
    return 1;
  }
  case TENSOR_MAP:
    if (Py_TYPE(value) != tensor_map_type) {
      PyErr_Format(PyExc_TypeError, "a TMA descriptor must be an encoded %s, not %s",
                   tensor_map_type->tp_name, Py_TYPE(value)->tp_name);
      return 0;
    }
    /* The map ends the object; its alignment there differs between versions of Triton. */
    *word = (uint64_t)(uintptr_t)((char *)value + tensor_map_type->tp_basicsize -
                                  sizeof(CUtensorMap));
    return 1;
  case CONSTANT:
    return 1;
  }
  PyErr_Format(PyExc_ValueError, "unknown kind of argument '%c'", kind);
  return 0;
}

/* Launch with these arguments, one word each. Returns 0 and sets an error on failure. */
static int submit(Launch *self, uint64_t stream, uint64_t *values) {
  void *parameters[MAX_ARGUMENTS + 2];
  uint64_t no_scratch = 0;
  _Alignas(128) CUtensorMap maps[MAX_MAPS];
  Py_ssize_t used = 0, used_maps = 0;
  for (Py_ssize_t number = 0; number < self->num_arguments; number++) {
    uint8_t kind = self->kinds[number];
    if (kind == TENSOR_MAP) {
      memcpy(&maps[used_maps], (void *)(uintptr_t)values[number], sizeof *maps);
      parameters[used++] = &maps[used_maps++];
    } else if (kind != CONSTANT) {
      parameters[used++] = &values[number];
    }
  }
  parameters[used++] = &no_scratch; /* global scratch memory */
  parameters[used++] = &no_scratch; /* profiler scratch memory */
  CUlaunchConfig config = self->config;
  config.hStream = (CUstream)(uintptr_t)stream;
  CUresult result;
  /* Without the GIL: a full stream blocks, and what it waits for may need Python. */
  Py_BEGIN_ALLOW_THREADS;
  result = self->launch(&config, self->function, parameters, NULL);
  if (result == CUDA_ERROR_INVALID_CONTEXT && self->context) { /* the first use in a thread */
    self->set_context(self->context);
    result = self->launch(&config, self->function, parameters, NULL);
  }
  Py_END_ALLOW_THREADS;
  if (result != CUDA_SUCCESS) {
    PyErr_Format(PyExc_RuntimeError, "a kernel launch failed with CUDA driver error %d", result);
    return 0;
  }
  return 1;
}

static PyObject *call(PyObject *object, PyObject *const *given, size_t flags, PyObject *names) {
  Launch *self = (Launch *)object;
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (count != self->num_slots + 1 || (names && PyTuple_GET_SIZE(names))) {
    PyErr_Format(PyExc_TypeError, "expected a stream and %zd arguments, got %zd values",
                 self->num_slots, count);
    return NULL;
  }
  uint64_t stream = PyLong_AsUnsignedLongLong(given[0]);
  if (stream == (uint64_t)-1 && PyErr_Occurred())
    return NULL;
  uint64_t values[MAX_ARGUMENTS];
  memcpy(values, self->values, self->num_arguments * sizeof *values);
  for (Py_ssize_t slot = 0; slot < self->num_slots; slot++) {
    uint8_t number = self->slots[slot];
    if (!convert(given[slot + 1], self->kinds[number], &values[number]))
      return NULL;
  }
  if (!submit(self, stream, values))
    return NULL;
  Py_RETURN_NONE;
}

/* Launch(functions, function, sizes, kinds, slots, values) */
static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  unsigned long long launch, get_context, set_context, function;
  unsigned x, y, z, threads, shared;
  int cooperative, pdl;
  const char *kinds;
  Py_ssize_t num_arguments;
  PyObject *slots, *values;
  if (!PyArg_ParseTuple(args, "(KKK)K(IIIIIpp)y#O!O!", &launch, &get_context, &set_context,
                        &function, &x, &y, &z, &threads, &shared, &cooperative, &pdl, &kinds,
                        &num_arguments, &PyTuple_Type, &slots, &PyTuple_Type, &values))
    return NULL;
  if (num_arguments > MAX_ARGUMENTS || PyTuple_GET_SIZE(values) != num_arguments ||
      PyTuple_GET_SIZE(slots) > num_arguments) {
    PyErr_Format(PyExc_ValueError, "%zd arguments, %zd values and %zd slots; at most %d arguments",
                 num_arguments, PyTuple_GET_SIZE(values), PyTuple_GET_SIZE(slots), MAX_ARGUMENTS);
    return NULL;
  }
  Py_ssize_t maps = 0;
  for (Py_ssize_t number = 0; number < num_arguments; number++)
    maps += kinds[number] == TENSOR_MAP;
  if (maps > MAX_MAPS) {
    PyErr_Format(PyExc_ValueError, "%zd descriptors; at most %d", maps, MAX_MAPS);
    return NULL;
  }
  Launch *self = (Launch *)type->tp_alloc(type, 0);
  if (!self)
    return NULL;
  self->vectorcall = call;
  self->launch = (LaunchFunction)(uintptr_t)launch;
  self->set_context = (SetContext)(uintptr_t)set_context;
  self->function = (CUfunction)(uintptr_t)function;
  if (((GetContext)(uintptr_t)get_context)(&self->context) != CUDA_SUCCESS)
    self->context = NULL;
  if (pdl) {
    CUlaunchAttribute *attribute = &self->attributes[self->config.numAttrs++];
    attribute->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute->value.programmaticStreamSerializationAllowed = 1;
  }
  if (cooperative) {
    CUlaunchAttribute *attribute = &self->attributes[self->config.numAttrs++];
    attribute->id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute->value.cooperative = 1;
  }
  self->config.attrs = self->attributes;
  self->config.gridDimX = x;
  self->config.gridDimY = y;
  self->config.gridDimZ = z;
  self->config.blockDimX = threads;
  self->config.blockDimY = self->config.blockDimZ = 1;
  self->config.sharedMemBytes = shared;
  self->num_arguments = num_arguments;
  self->num_slots = PyTuple_GET_SIZE(slots);
  memcpy(self->kinds, kinds, num_arguments);
  uint8_t changes[MAX_ARGUMENTS] = {0};
  for (Py_ssize_t slot = 0; slot < self->num_slots; slot++) {
    size_t number = PyLong_AsSize_t(PyTuple_GET_ITEM(slots, slot));
    if (number >= (size_t)num_arguments) {
      if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "slot %zu of %zd arguments", number, num_arguments);
      Py_DECREF(self);
      return NULL;
    }
    self->slots[slot] = (uint8_t)number;
    changes[number] = 1;
  }
  for (Py_ssize_t number = 0; number < num_arguments; number++) {
    PyObject *value = PyTuple_GET_ITEM(values, number);
    if (!changes[number] && !convert(value, self->kinds[number], &self->values[number])) {
      Py_DECREF(self);
      return NULL;
    }
  }
  self->fixed = Py_NewRef(values);
  return (PyObject *)self;
}

static void delete(PyObject *object) {
  Py_XDECREF(((Launch *)object)->fixed);
  Py_TYPE(object)->tp_free(object);
}

static PyTypeObject launch_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "attnlib_native.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "A kernel launch with most arguments in place: launch(stream, *changing).",
    .tp_new = create,
    .tp_dealloc = delete,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
};
