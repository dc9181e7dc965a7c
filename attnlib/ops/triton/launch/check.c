/* `check(*tensors, *same) -> bool`: runs a sequence if the tensors are like those of an earlier call.
 *
 * They must agree in type, dtype, shape, strides and device; those of `same` also in address.
 * Tensors are read by DLPack's C exchange API (https://github.com/dmlc/dlpack, version 1), of which
 * the next structures are the part that is used. While gradients are recorded it returns False,
 * because tensors are not asked whether they require one.
 */
#define MAX_DIMS 5
#define MAX_VALUES 16

typedef struct {
  int32_t type, id;
} DeviceOfTensor;

typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} TypeOfElements;

typedef struct {
  void *data;
  DeviceOfTensor device;
  int32_t ndim;
  TypeOfElements dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} TensorView;

typedef struct {
  uint32_t major, minor;
  void *previous;
  void *allocate, *export_tensor, *import_tensor;
  int (*read)(void *, TensorView *);
  void *current_stream;
} ExchangeInterface;

static int (*read_tensor)(void *, TensorView *);
static PyTypeObject *tensor_type;

/* What a value must be. */
enum { NOTHING, ANYTHING, LIKE };

typedef struct {
  uint8_t wanted;
  PyTypeObject *type;
  DeviceOfTensor device;
  TypeOfElements dtype;
  int32_t ndim;
  int64_t shape[MAX_DIMS], strides[MAX_DIMS];
  uint64_t address; /* of a tensor of `same` */
} Facts;

typedef struct {
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  Sequence *sequence;
  PyObject *is_grad_enabled;
  Py_ssize_t num_values;
  Facts facts[MAX_VALUES];
} Check;

static uint64_t address_of(const TensorView *view) {
  return (uint64_t)(uintptr_t)view->data + view->byte_offset;
}

static int is_like(const TensorView *view, const Facts *facts) {
  size_t size = facts->ndim * sizeof *facts->shape;
  return view->ndim == facts->ndim &&
         !memcmp(&view->device, &facts->device, sizeof facts->device) &&
         !memcmp(&view->dtype, &facts->dtype, sizeof facts->dtype) &&
         !memcmp(view->shape, facts->shape, size) && !memcmp(view->strides, facts->strides, size);
}

static PyObject *call_check(PyObject *object, PyObject *const *given, size_t flags,
                            PyObject *names) {
  const Check *self = (Check *)object;
  Py_ssize_t num_tensors = self->sequence->template->num_tensors;
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (count != self->num_values || (names && PyTuple_GET_SIZE(names))) {
    PyErr_Format(PyExc_TypeError, "expected %zd tensors, got %zd values", self->num_values, count);
    return NULL;
  }
  PyObject *found = PyObject_CallNoArgs(self->is_grad_enabled);
  if (!found)
    return NULL;
  int records = PyObject_IsTrue(found);
  Py_DECREF(found);
  if (records)
    return records < 0 ? NULL : Py_NewRef(Py_False);
  uint64_t words[MAX_VALUES];
  for (Py_ssize_t number = 0; number < count; number++) {
    const Facts *facts = &self->facts[number];
    PyObject *value = given[number];
    words[number] = 0;
    if (value == Py_None) {
      if (facts->wanted == LIKE)
        Py_RETURN_FALSE;
      continue;
    }
    if (facts->wanted == NOTHING ||
        (facts->wanted == LIKE ? Py_TYPE(value) != facts->type
                               : !PyObject_TypeCheck(value, tensor_type)))
      Py_RETURN_FALSE;
    TensorView view;
    if (read_tensor(value, &view)) { /* a tensor without memory */
      PyErr_Clear();
      Py_RETURN_FALSE;
    }
    if (facts->wanted == LIKE && (!view.strides || !is_like(&view, facts)))
      Py_RETURN_FALSE;
    words[number] = address_of(&view);
    if (number >= num_tensors && words[number] != facts->address)
      Py_RETURN_FALSE;
  }
  return run(self->sequence, words);
}

static void delete_check(PyObject *object) {
  Check *self = (Check *)object;
  for (Py_ssize_t number = 0; number < self->num_values; number++)
    Py_XDECREF(self->facts[number].type);
  Py_XDECREF(self->sequence);
  Py_XDECREF(self->is_grad_enabled);
  Py_TYPE(object)->tp_free(object);
}

static int note_facts(Facts *facts, PyObject *value) {
  facts->wanted = value == Py_None ? NOTHING : value == Py_Ellipsis ? ANYTHING : LIKE;
  if (facts->wanted != LIKE)
    return 1;
  TensorView view;
  if (!PyObject_TypeCheck(value, tensor_type)) {
    PyErr_Format(PyExc_TypeError, "expected a tensor, None or ..., not %s", Py_TYPE(value)->tp_name);
    return 0;
  }
  if (read_tensor(value, &view)) { /* nor will a call read it: it returns False */
    PyErr_Clear();
    facts->wanted = ANYTHING;
    return 1;
  }
  if (view.ndim > MAX_DIMS || !view.strides) {
    PyErr_Format(PyExc_ValueError, "%d dimensions; at most %d, with strides", view.ndim, MAX_DIMS);
    return 0;
  }
  facts->type = (PyTypeObject *)Py_NewRef(Py_TYPE(value));
  facts->device = view.device;
  facts->dtype = view.dtype;
  facts->ndim = view.ndim;
  memcpy(facts->shape, view.shape, view.ndim * sizeof *view.shape);
  memcpy(facts->strides, view.strides, view.ndim * sizeof *view.strides);
  facts->address = address_of(&view);
  return 1;
}

static PyTypeObject check_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "attnlib_native.Check",
    .tp_basicsize = sizeof(Check),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "A sequence for tensors like those of an earlier call: check(*tensors, *same).",
    .tp_dealloc = delete_check,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Check, vectorcall),
};

/* sequence.compare(is_grad_enabled, (tensor, None or ..., for each value)): None where tensors cannot
 * be read. */
static PyObject *compare_calls(PyObject *sequence, PyObject *args) {
  PyObject *is_grad_enabled, *like;
  if (!PyArg_ParseTuple(args, "OO!", &is_grad_enabled, &PyTuple_Type, &like))
    return NULL;
  if (!read_tensor)
    Py_RETURN_NONE;
  Py_ssize_t count = PyTuple_GET_SIZE(like);
  Py_ssize_t num_tensors = ((Sequence *)sequence)->template->num_tensors;
  if (count > MAX_VALUES || count < num_tensors) {
    PyErr_Format(PyExc_ValueError, "%zd values for %zd tensors; at most %d", count, num_tensors,
                 MAX_VALUES);
    return NULL;
  }
  Check *self = (Check *)check_type.tp_alloc(&check_type, 0);
  if (!self)
    return NULL;
  self->vectorcall = call_check;
  self->sequence = (Sequence *)Py_NewRef(sequence);
  self->is_grad_enabled = Py_NewRef(is_grad_enabled);
  self->num_values = count;
  for (Py_ssize_t number = 0; number < count; number++)
    if (!note_facts(&self->facts[number], PyTuple_GET_ITEM(like, number))) {
      Py_DECREF(self);
      return NULL;
    }
  return (PyObject *)self;
}

/* Whether tensors of this type can be read by DLPack's C exchange API. */
static PyObject *use_tensor_type(PyObject *module, PyObject *type) {
  PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (!capsule) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  ExchangeInterface *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule); /* what it points to is static */
  if (!found)
    PyErr_Clear();
  if (!found || found->major != 1 || !found->read || !PyType_Check(type))
    Py_RETURN_FALSE;
  PyTypeObject *before = tensor_type;
  tensor_type = (PyTypeObject *)Py_NewRef(type);
  Py_XDECREF(before);
  read_tensor = found->read;
  Py_RETURN_TRUE;
}

static PyObject *use_tensor_map_type(PyObject *module, PyObject *type) {
  if (!PyType_Check(type)) {
    PyErr_SetString(PyExc_TypeError, "expected a type");
    return NULL;
  }
  PyTypeObject *before = tensor_map_type;
  tensor_map_type = (PyTypeObject *)Py_NewRef(type);
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"use_tensor_map_type", use_tensor_map_type, METH_O, "Set the type of encoded descriptors."},
    {"use_tensor_type", use_tensor_type, METH_O,
     "Set the type of tensors; whether they can be compared."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "attnlib_native", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_attnlib_native(void) {
  if (PyType_Ready(&launch_type) < 0 || PyType_Ready(&sequence_type) < 0 ||
      PyType_Ready(&template_type) < 0 || PyType_Ready(&check_type) < 0)
    return NULL;
  if (!data_ptr && !(data_ptr = PyUnicode_InternFromString("data_ptr")))
    return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (!module)
    return NULL;
  Py_INCREF(Py_None->ob_type);
  tensor_map_type = Py_None->ob_type; /* until `use_tensor_map_type` */
  if (PyModule_AddObjectRef(module, "Launch", (PyObject *)&launch_type) < 0 ||
      PyModule_AddObjectRef(module, "Sequence", (PyObject *)&sequence_type) < 0 ||
      PyModule_AddObjectRef(module, "Template", (PyObject *)&template_type) < 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
