/* All launches of one call: `template.bind(values) -> sequence`, `sequence(*tensors) -> bool`.
 *
 * A template has everything but addresses and outlives a batch. The first layer of a batch binds it
 * to the values of the batch: addresses of its tensors, and a few numbers. A layer that runs its
 * step plan again has other tensors, and everything else is in place. One call reads their
 * addresses, looks up the encoded descriptors of these addresses, and submits the launches of
 * `native.c` in order. It launches nothing and returns False where Triton has to launch: an address
 * is not a multiple of 16, another device is current, or launches are observed.
 */
#define MAX_TENSORS 32
#define MAX_BATCH_VALUES 64
#define MAX_LOOKUPS 4
#define MAX_FOUND (MAX_LOOKUPS * MAX_MAPS)
#define MAX_LAUNCHES 8
#define ALIGNMENT 15

/* How the address of a given tensor is used. */
enum { UNUSED, ANY, ALIGNED, NUM_ROLES };

/* What fills one slot of a launch. */
typedef struct {
  Py_ssize_t index; /* a given tensor, then a found descriptor; -1 for `value`; below that, values of
                       the batch: -2 for the first */
  uint64_t value;   /* added to the address of a tensor that is given */
} Use;

#define FIRST_BATCH_VALUE -2

typedef struct {
  Launch *launch;
  Use *uses; /* one per slot */
} Step;

/* Encoded descriptors by the addresses of one or two tensors. */
typedef struct {
  PyObject *table, *encode;
  Py_ssize_t num_keys, num_found;
  Use keys[2];
} Lookup;

typedef struct {
  PyObject_HEAD;
  PyObject *current_device, *current_stream, *observed, *device;
  Py_ssize_t num_tensors, num_lookups, num_steps, num_batch_values;
  uint8_t roles[MAX_TENSORS];
  Lookup lookups[MAX_LOOKUPS];
  Step steps[MAX_LAUNCHES];
} Template;

typedef struct {
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  Template *template;
  PyObject *values; /* keeps the descriptors behind `batch` alive */
  uint64_t batch[MAX_BATCH_VALUES];
} Sequence;

static PyObject *data_ptr; /* the name of the method */

/* The descriptors of a lookup, as a new reference to a tuple. */
static PyObject *find(const Lookup *lookup, const uint64_t *words) {
  PyObject *addresses[2] = {NULL, NULL}, *key = NULL, *found = NULL;
  for (Py_ssize_t number = 0; number < lookup->num_keys; number++) {
    const Use *use = &lookup->keys[number];
    if (!(addresses[number] = PyLong_FromUnsignedLongLong(words[use->index] + use->value)))
      goto done;
  }
  key = lookup->num_keys == 1 ? Py_NewRef(addresses[0])
                              : PyTuple_Pack(2, addresses[0], addresses[1]);
  if (!key)
    goto done;
  found = Py_XNewRef(PyDict_GetItemWithError(lookup->table, key));
  if (!found && !PyErr_Occurred())
    found = PyObject_Vectorcall(lookup->encode, addresses, lookup->num_keys, NULL);
  if (found && (!PyTuple_Check(found) || PyTuple_GET_SIZE(found) != lookup->num_found)) {
    PyErr_Format(PyExc_TypeError, "expected a tuple of %zd descriptors", lookup->num_found);
    Py_CLEAR(found);
  }
done:
  Py_XDECREF(key);
  Py_XDECREF(addresses[0]);
  Py_XDECREF(addresses[1]);
  return found;
}

/* Whether the launches are possible now: 1, 0, or -1 with an error set. */
static int is_possible(const Template *self) {
  PyObject *found = PyObject_CallNoArgs(self->current_device);
  if (!found)
    return -1;
  int same = PyObject_RichCompareBool(found, self->device, Py_EQ);
  Py_DECREF(found);
  if (same != 1)
    return same;
  if (!(found = PyObject_CallNoArgs(self->observed)))
    return -1;
  int observed = PyObject_IsTrue(found);
  Py_DECREF(found);
  return observed < 0 ? -1 : !observed;
}

static int launch_steps(const Template *self, const uint64_t *batch, const uint64_t *words,
                        PyObject *const *maps) {
  PyObject *found = PyObject_CallOneArg(self->current_stream, self->device);
  if (!found)
    return 0;
  uint64_t stream = PyLong_AsUnsignedLongLong(found);
  Py_DECREF(found);
  if (stream == (uint64_t)-1 && PyErr_Occurred())
    return 0;
  for (Py_ssize_t number = 0; number < self->num_steps; number++) {
    Launch *launch = self->steps[number].launch;
    uint64_t values[MAX_ARGUMENTS];
    memcpy(values, launch->values, launch->num_arguments * sizeof *values);
    for (Py_ssize_t slot = 0; slot < launch->num_slots; slot++) {
      const Use *use = &self->steps[number].uses[slot];
      uint8_t argument = launch->slots[slot];
      if (use->index <= FIRST_BATCH_VALUE)
        values[argument] = batch[FIRST_BATCH_VALUE - use->index];
      else if (use->index < 0)
        values[argument] = use->value;
      else if (use->index < self->num_tensors) /* a null pointer stays one */
        values[argument] = words[use->index] ? words[use->index] + use->value : 0;
      else if (!convert(maps[use->index - self->num_tensors], launch->kinds[argument],
                        &values[argument]))
        return 0;
    }
    if (!submit(launch, stream, values))
      return 0;
  }
  return 1;
}

/* Run the launches for tensors at these addresses; False where Triton has to launch. */
static PyObject *run(const Sequence *sequence, const uint64_t *words) {
  const Template *self = sequence->template;
  uint64_t addresses = 0;
  for (Py_ssize_t number = 0; number < self->num_tensors; number++)
    if (self->roles[number] == ALIGNED)
      addresses |= words[number];
  if (addresses & ALIGNMENT)
    Py_RETURN_FALSE;
  int possible = is_possible(self);
  if (possible != 1)
    return possible < 0 ? NULL : Py_NewRef(Py_False);
  PyObject *found[MAX_LOOKUPS], *maps[MAX_FOUND];
  Py_ssize_t num_found = 0, num_maps = 0;
  int done = 1;
  for (Py_ssize_t number = 0; done && number < self->num_lookups; number++) {
    if (!(found[number] = find(&self->lookups[number], words))) {
      done = 0;
      break;
    }
    num_found++;
    for (Py_ssize_t item = 0; item < self->lookups[number].num_found; item++)
      maps[num_maps++] = PyTuple_GET_ITEM(found[number], item);
  }
  done = done && launch_steps(self, sequence->batch, words, maps);
  while (num_found)
    Py_DECREF(found[--num_found]);
  return done ? Py_NewRef(Py_True) : NULL;
}

static PyObject *call_sequence(PyObject *object, PyObject *const *given, size_t flags,
                               PyObject *names) {
  const Template *self = ((Sequence *)object)->template;
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (count != self->num_tensors || (names && PyTuple_GET_SIZE(names))) {
    PyErr_Format(PyExc_TypeError, "expected %zd tensors, got %zd values", self->num_tensors, count);
    return NULL;
  }
  uint64_t words[MAX_TENSORS];
  for (Py_ssize_t number = 0; number < count; number++) {
    words[number] = 0;
    if (self->roles[number] == UNUSED || given[number] == Py_None)
      continue;
    PyObject *address = PyObject_VectorcallMethod(data_ptr, given + number, 1, NULL);
    if (!address)
      return NULL;
    words[number] = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    if (words[number] == (uint64_t)-1 && PyErr_Occurred())
      return NULL;
  }
  return run((Sequence *)object, words);
}

static void delete_sequence(PyObject *object) {
  Py_XDECREF(((Sequence *)object)->template);
  Py_XDECREF(((Sequence *)object)->values);
  Py_TYPE(object)->tp_free(object);
}

static void delete_template(PyObject *object) {
  Template *self = (Template *)object;
  for (Py_ssize_t number = 0; number < self->num_lookups; number++) {
    Py_XDECREF(self->lookups[number].table);
    Py_XDECREF(self->lookups[number].encode);
  }
  for (Py_ssize_t number = 0; number < self->num_steps; number++) {
    Py_XDECREF(self->steps[number].launch);
    PyMem_Free(self->steps[number].uses);
  }
  Py_XDECREF(self->current_device);
  Py_XDECREF(self->current_stream);
  Py_XDECREF(self->observed);
  Py_XDECREF(self->device);
  Py_TYPE(object)->tp_free(object);
}

/* Add (((tensor, offset), ...), table, encode, number of descriptors). */
static int add_lookup(Template *self, PyObject *given, Py_ssize_t *num_maps) {
  Lookup *lookup = &self->lookups[self->num_lookups];
  PyObject *keys, *table, *encode;
  Py_ssize_t num_found;
  unsigned long long offset;
  if (!PyArg_ParseTuple(given, "O!O!On", &PyTuple_Type, &keys, &PyDict_Type, &table, &encode,
                        &num_found))
    return 0;
  lookup->num_keys = PyTuple_GET_SIZE(keys);
  if (lookup->num_keys < 1 || lookup->num_keys > 2 || num_found < 0 || num_found > MAX_MAPS) {
    PyErr_SetString(PyExc_ValueError, "a lookup has 1 or 2 addresses and at most 4 descriptors");
    return 0;
  }
  for (Py_ssize_t number = 0; number < lookup->num_keys; number++) {
    Use *use = &lookup->keys[number];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(keys, number), "nK", &use->index, &offset))
      return 0;
    if (use->index < 0 || use->index >= self->num_tensors) {
      PyErr_Format(PyExc_ValueError, "tensor %zd of %zd", use->index, self->num_tensors);
      return 0;
    }
    use->value = offset;
  }
  lookup->num_found = num_found;
  lookup->table = Py_NewRef(table);
  lookup->encode = Py_NewRef(encode);
  *num_maps += num_found;
  self->num_lookups++;
  return 1;
}

/* Add (launch, ((index, offset or value), ...)). */
static int add_step(Template *self, PyObject *given, Py_ssize_t num_maps) {
  Step *step = &self->steps[self->num_steps];
  PyObject *launch, *uses;
  if (!PyArg_ParseTuple(given, "O!O!", &launch_type, &launch, &PyTuple_Type, &uses))
    return 0;
  Launch *found = (Launch *)launch;
  if (PyTuple_GET_SIZE(uses) != found->num_slots) {
    PyErr_Format(PyExc_ValueError, "%zd values for a launch with %zd", PyTuple_GET_SIZE(uses),
                 found->num_slots);
    return 0;
  }
  step->uses = PyMem_Calloc(found->num_slots + 1, sizeof *step->uses);
  if (!step->uses) {
    PyErr_NoMemory();
    return 0;
  }
  step->launch = (Launch *)Py_NewRef(launch);
  self->num_steps++;
  for (Py_ssize_t slot = 0; slot < found->num_slots; slot++) {
    Use *use = &step->uses[slot];
    uint8_t kind = found->kinds[found->slots[slot]];
    PyObject *value;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(uses, slot), "nO", &use->index, &value))
      return 0;
    int is_tensor = use->index >= 0 && use->index < self->num_tensors;
    int of_batch = use->index <= FIRST_BATCH_VALUE;
    if (use->index >= self->num_tensors + num_maps ||
        use->index <= FIRST_BATCH_VALUE - self->num_batch_values ||
        (of_batch && (kind == FLOAT32 || kind == FLOAT64)) ||
        (is_tensor && kind != POINTER && kind != CONSTANT)) { /* a tensor that is None is constant */
      PyErr_Format(PyExc_ValueError, "value %zd of %zd tensors and %zd descriptors cannot be an "
                   "argument of kind '%c'", use->index, self->num_tensors, num_maps, kind);
      return 0;
    }
    if (use->index == -1 && kind == TENSOR_MAP) {
      PyErr_SetString(PyExc_ValueError, "a descriptor that does not change belongs to the launch");
      return 0;
    }
    if (!convert(value, use->index == -1 ? kind : INT64, &use->value))
      return 0;
  }
  return 1;
}

/* Template(functions, device, roles, lookups, steps, number of batch values) */
static PyObject *create_template(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  PyObject *current_device, *current_stream, *observed, *device, *lookups, *steps;
  const char *roles;
  Py_ssize_t num_tensors, num_batch_values, num_maps = 0;
  if (!PyArg_ParseTuple(args, "(OOO)O!y#O!O!n", &current_device, &current_stream, &observed,
                        &PyLong_Type, &device, &roles, &num_tensors, &PyTuple_Type, &lookups,
                        &PyTuple_Type, &steps, &num_batch_values))
    return NULL;
  if (num_batch_values < 0 || num_batch_values > MAX_BATCH_VALUES) {
    PyErr_Format(PyExc_ValueError, "%zd values of a batch; at most %d", num_batch_values,
                 MAX_BATCH_VALUES);
    return NULL;
  }
  if (num_tensors > MAX_TENSORS || PyTuple_GET_SIZE(lookups) > MAX_LOOKUPS ||
      PyTuple_GET_SIZE(steps) > MAX_LAUNCHES) {
    PyErr_Format(PyExc_ValueError, "%zd tensors, %zd lookups and %zd launches; at most %d, %d, %d",
                 num_tensors, PyTuple_GET_SIZE(lookups), PyTuple_GET_SIZE(steps), MAX_TENSORS,
                 MAX_LOOKUPS, MAX_LAUNCHES);
    return NULL;
  }
  Template *self = (Template *)type->tp_alloc(type, 0);
  if (!self)
    return NULL;
  self->num_batch_values = num_batch_values;
  self->current_device = Py_NewRef(current_device);
  self->current_stream = Py_NewRef(current_stream);
  self->observed = Py_NewRef(observed);
  self->device = Py_NewRef(device);
  self->num_tensors = num_tensors;
  for (Py_ssize_t number = 0; number < num_tensors; number++) {
    self->roles[number] = (uint8_t)roles[number];
    if (self->roles[number] >= NUM_ROLES) {
      PyErr_Format(PyExc_ValueError, "unknown role %d", roles[number]);
      goto failed;
    }
  }
  for (Py_ssize_t number = 0; number < PyTuple_GET_SIZE(lookups); number++)
    if (!add_lookup(self, PyTuple_GET_ITEM(lookups, number), &num_maps))
      goto failed;
  for (Py_ssize_t number = 0; number < PyTuple_GET_SIZE(steps); number++)
    if (!add_step(self, PyTuple_GET_ITEM(steps, number), num_maps))
      goto failed;
  return (PyObject *)self;
failed:
  Py_DECREF(self);
  return NULL;
}

static PyObject *compare_calls(PyObject *object, PyObject *args); /* check.c */

static PyMethodDef sequence_methods[] = {
    {"compare", compare_calls, METH_VARARGS, "A function for tensors like those of an earlier call."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject sequence_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "attnlib_native.Sequence",
    .tp_basicsize = sizeof(Sequence),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "All launches of one call: sequence(*tensors) -> bool.",
    .tp_methods = sequence_methods,
    .tp_dealloc = delete_sequence,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Sequence, vectorcall),
};

/* template.bind((address, number, encoded descriptor or None, ...)) */
static PyObject *bind_template(PyObject *object, PyObject *values) {
  Template *self = (Template *)object;
  if (!PyTuple_Check(values) || PyTuple_GET_SIZE(values) != self->num_batch_values) {
    PyErr_Format(PyExc_TypeError, "expected a tuple of %zd values", self->num_batch_values);
    return NULL;
  }
  Sequence *sequence = (Sequence *)sequence_type.tp_alloc(&sequence_type, 0);
  if (!sequence)
    return NULL;
  sequence->vectorcall = call_sequence;
  sequence->template = (Template *)Py_NewRef(object);
  sequence->values = Py_NewRef(values);
  for (Py_ssize_t number = 0; number < self->num_steps; number++) {
    const Step *step = &self->steps[number];
    for (Py_ssize_t slot = 0; slot < step->launch->num_slots; slot++) {
      Py_ssize_t value = FIRST_BATCH_VALUE - step->uses[slot].index;
      uint8_t kind = step->launch->kinds[step->launch->slots[slot]];
      if (value >= 0 && kind != CONSTANT &&
          !convert(PyTuple_GET_ITEM(values, value), kind, &sequence->batch[value])) {
        Py_DECREF(sequence);
        return NULL;
      }
    }
  }
  return (PyObject *)sequence;
}

static PyMethodDef template_methods[] = {
    {"bind", bind_template, METH_O, "The launches with the values of a batch in place."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject template_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "attnlib_native.Template",
    .tp_basicsize = sizeof(Template),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The launches of one kind of call without addresses: template.bind(values).",
    .tp_new = create_template,
    .tp_dealloc = delete_template,
    .tp_methods = template_methods,
};
