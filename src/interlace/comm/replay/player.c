/* Play calls that have been recorded; tapes.py says what they are, and compiles this.

   Tensors are read by the functions that PyTorch keeps stable for compiled programs (aoti_torch_*),
   whose addresses init() gets, so nothing of PyTorch is compiled here. Such a function takes a
   pointer to an at::Tensor, which lies within the object of a Python tensor. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>

#define MOST_SLOTS 64
#define MOST_ARGUMENTS 64
#define KEY_BYTES 2048
#define MOST_KEYS 4096
#define FIRST_TRY 2
#define MOST_REFUSALS 16

/* What a tensor is */

typedef int (*of_tensor_32)(void *, int32_t *);
typedef int (*of_tensor_64)(void *, int64_t *);
typedef int (*of_tensor_pointer)(void *, void **);

static PyTypeObject *tensor_type, *parameter_type, *dtype_type, *group_type;
static PyObject *as_plain; /* the context in which parameters of subclasses are plain tensors */
static PyObject *strided;  /* the layout of tensors with strides */
static PyObject *is_grad_enabled;
static PyObject *enter_name, *exit_name, *value_name, *layout_name, *is_neg_name, *gradient_name;
static Py_ssize_t tensor_offset;
static of_tensor_64 get_dim;
static of_tensor_pointer get_sizes, get_strides, get_data_ptr;
static of_tensor_32 get_dtype, get_device_type, get_device_index;

static PyObject *init(PyObject *module, PyObject *args) {
  PyObject *tensor, *parameter, *dtype, *group, *layout, *plain, *with_gradients;
  unsigned long long at[7];
  if (!PyArg_ParseTuple(args, "OOOOOOOnKKKKKKK", &tensor, &parameter, &dtype, &group, &layout,
                        &plain, &with_gradients, &tensor_offset, &at[0], &at[1], &at[2], &at[3],
                        &at[4], &at[5], &at[6]))
    return NULL;
  enter_name = PyUnicode_InternFromString("__enter__");
  exit_name = PyUnicode_InternFromString("__exit__");
  value_name = PyUnicode_InternFromString("value");
  layout_name = PyUnicode_InternFromString("layout");
  is_neg_name = PyUnicode_InternFromString("is_neg");
  gradient_name = PyUnicode_InternFromString("requires_grad");
  if (enter_name == NULL || exit_name == NULL || value_name == NULL || layout_name == NULL ||
      is_neg_name == NULL || gradient_name == NULL)
    return NULL;
  as_plain = Py_NewRef(plain);
  strided = Py_NewRef(layout);
  is_grad_enabled = Py_NewRef(with_gradients);
  group_type = (PyTypeObject *)Py_NewRef(group);
  tensor_type = (PyTypeObject *)Py_NewRef(tensor);
  parameter_type = (PyTypeObject *)Py_NewRef(parameter);
  dtype_type = (PyTypeObject *)Py_NewRef(dtype);
  get_dim = (of_tensor_64)(uintptr_t)at[0];
  get_sizes = (of_tensor_pointer)(uintptr_t)at[1];
  get_strides = (of_tensor_pointer)(uintptr_t)at[2];
  get_data_ptr = (of_tensor_pointer)(uintptr_t)at[3];
  get_dtype = (of_tensor_32)(uintptr_t)at[4];
  get_device_type = (of_tensor_32)(uintptr_t)at[5];
  get_device_index = (of_tensor_32)(uintptr_t)at[6];
  Py_RETURN_NONE;
}

/* Keys: all that a call depends on but the addresses of its tensors beyond a multiple of 16 */

typedef struct {
  char bytes[KEY_BYTES];
  size_t length;
  int has_gradients; /* of a public call: whether a tensor requires one */
} Key;

static int put(Key *key, char tag, const void *bytes, size_t length) {
  if (key->length + 1 + length > KEY_BYTES) return 0;
  key->bytes[key->length++] = tag;
  memcpy(key->bytes + key->length, bytes, length);
  key->length += length;
  return 1;
}

static int put_tensor(Key *key, PyObject *value) {
  void *tensor = (char *)value + tensor_offset, *sizes, *strides, *address;
  int64_t dims;
  int32_t numbers[5];
  if (get_dim(tensor, &dims) || get_sizes(tensor, &sizes) || get_strides(tensor, &strides) ||
      get_data_ptr(tensor, &address) || get_dtype(tensor, &numbers[0]) ||
      get_device_type(tensor, &numbers[1]) || get_device_index(tensor, &numbers[2]))
    return 0;
  numbers[3] = (int32_t)((uintptr_t)address % 16);
  numbers[4] = (int32_t)dims; /* without them a key could be read in two ways */
  return put(key, 't', numbers, sizeof numbers) &&
         put(key, 'd', sizes, dims * sizeof(int64_t)) &&
         put(key, 'd', strides, dims * sizeof(int64_t));
}

/* Return whether a tensor of no subclass is what it says in memory: it has strides, and nothing is
   left to negate. */
static int is_as_it_lies(PyObject *value) {
  PyObject *found = PyObject_GetAttr(value, layout_name);
  int is_strided = found == strided;
  Py_XDECREF(found);
  found = is_strided ? PyObject_CallMethodNoArgs(value, is_neg_name) : NULL;
  int is_plain = found == Py_False;
  Py_XDECREF(found);
  PyErr_Clear();
  return is_plain;
}

/* Put a tensor of a user behind a key, and note whether it requires a gradient. */
static int put_users_tensor(Key *key, PyObject *value) {
  PyObject *wants_gradient = PyObject_GetAttr(value, gradient_name);
  int is_put = wants_gradient != NULL && is_as_it_lies(value) && put_tensor(key, value);
  key->has_gradients |= wants_gradient == Py_True;
  Py_XDECREF(wants_gradient);
  PyErr_Clear();
  return is_put;
}

/* Put behind a key whether gradients are recorded; return 0 where that of this call is. */
static int put_mode(Key *key) {
  PyObject *mode = PyObject_CallNoArgs(is_grad_enabled);
  int is_put = mode != NULL && !(mode == Py_True && key->has_gradients) &&
               put(key, 'm', &mode, sizeof mode);
  Py_XDECREF(mode); /* True or False, which stay */
  PyErr_Clear();
  return is_put;
}

/* Put an argument behind a key; return 0 where what it says is not known. Constants, and dtypes,
   are one object each as long as the process runs; a process group is that of its address as long
   as its name is its, which tapes ask.

   With is_public arguments are what users give, who may give anything. */
static int put_argument(Key *key, PyObject *value, int is_public) {
  PyTypeObject *type = Py_TYPE(value);
  if (is_public && (type == tensor_type || type == parameter_type))
    return put_users_tensor(key, value);
  if (!is_public && (type == tensor_type || PyType_IsSubtype(type, parameter_type)))
    return put_tensor(key, value);
  if (value == Py_None || type == &PyBool_Type || type == dtype_type || type == group_type)
    return put(key, 'o', &value, sizeof value);
  if (type == &PyUnicode_Type) {
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == NULL) {
      PyErr_Clear();
      return 0;
    }
    return put(key, 'n', &length, sizeof length) && put(key, 's', text, length);
  }
  if (type == &PyFloat_Type) {
    double number = PyFloat_AS_DOUBLE(value);
    return put(key, 'f', &number, sizeof number);
  }
  if (type == &PyLong_Type) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow && put(key, 'i', &number, sizeof number);
  }
  if (type == &PyList_Type && PyList_GET_SIZE(value) == 0) return put(key, 'e', "", 0);
  return 0;
}

/* Expressions: a constant, a slot, or a tuple of expressions */

typedef struct Expression {
  PyObject *constant;    /* not NULL: the value */
  Py_ssize_t slot;       /* of a slot, else -1 */
  PyTypeObject *type;    /* of a tuple */
  Py_ssize_t length;     /* of a tuple */
  struct Expression *of; /* what a tuple holds */
} Expression;

static void clear_expression(Expression *made) {
  Py_CLEAR(made->constant);
  Py_CLEAR(made->type);
  for (Py_ssize_t i = 0; i < made->length; i++) clear_expression(&made->of[i]);
  PyMem_Free(made->of);
  made->of = NULL;
  made->length = 0;
}

/* Read ("constant", value), ("slot", number) or ("tuple", type, (expression, ...)). */
static int read_expression(PyObject *text, Expression *made) {
  memset(made, 0, sizeof *made);
  made->slot = -1;
  const char *kind;
  PyObject *first, *second = NULL;
  if (!PyArg_ParseTuple(text, "sO|O!", &kind, &first, &PyTuple_Type, &second)) return 0;
  if (kind[0] == 'c') {
    made->constant = Py_NewRef(first);
  } else if (kind[0] == 's') {
    made->slot = PyLong_AsSsize_t(first);
    if (made->slot < 0 || made->slot >= MOST_SLOTS) {
      PyErr_SetString(PyExc_ValueError, "a slot must be one of a tape's");
      return 0;
    }
  } else {
    made->type = (PyTypeObject *)Py_NewRef(first);
    Py_ssize_t length = PyTuple_GET_SIZE(second);
    made->of = PyMem_Calloc(length ? length : 1, sizeof(Expression));
    if (made->of == NULL) {
      PyErr_NoMemory();
      return 0;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
      made->length = i + 1;
      if (!read_expression(PyTuple_GET_ITEM(second, i), &made->of[i])) return 0;
    }
  }
  return 1;
}

/* Return a new reference to an expression's value. */
static PyObject *value_of(const Expression *made, PyObject **slots) {
  if (made->constant != NULL) return Py_NewRef(made->constant);
  if (made->slot >= 0) return Py_NewRef(slots[made->slot]);
  /* A named tuple is laid out as a tuple is. */
  PyObject *tuple = made->type == &PyTuple_Type ? PyTuple_New(made->length)
                                                : made->type->tp_alloc(made->type, made->length);
  if (tuple == NULL) return NULL;
  for (Py_ssize_t i = 0; i < made->length; i++) {
    PyObject *item = value_of(&made->of[i], slots);
    if (item == NULL) {
      Py_DECREF(tuple);
      return NULL;
    }
    PyTuple_SET_ITEM(tuple, i, item);
  }
  return tuple;
}

static int visit_expression(const Expression *made, visitproc visit, void *arg) {
  Py_VISIT(made->constant);
  Py_VISIT(made->type);
  for (Py_ssize_t i = 0; i < made->length; i++) {
    int stop = visit_expression(&made->of[i], visit, arg);
    if (stop) return stop;
  }
  return 0;
}

/* Tapes */

typedef struct {
  PyObject *function;
  PyObject *names; /* of the last arguments, or NULL */
  Expression arguments;
  Py_ssize_t slot, results; /* the first slot of the result, and their number */
  char kind;                /* 'l' for a launch, 'a' for an attempt, or 'c' */
} Step;

/* What must be so for a call to be played: what a function returns, what an object has under a
   name, or what a mapping has under a key. */
typedef struct {
  char kind; /* 'c', 'a' or 'i' */
  PyObject *object, *argument;
  PyObject *expected; /* NULL where no more than the address of the object is known */
  void *address;
} Condition;

typedef struct {
  PyObject_HEAD
  Step *steps;
  Condition *conditions;
  Py_ssize_t count, slots, condition_count;
  Expression result;
  PyObject *launches, *failed, *kept, *weak_references;
  int is_closed, playing, refusals; /* refusals: how often in a row it was not permitted */
} Tape;

static int tape_clear(Tape *self) {
  /* What goes may run code that clears this tape again, which then finds nothing. */
  Step *steps = self->steps;
  Condition *conditions = self->conditions;
  Expression result = self->result;
  Py_ssize_t count = self->count, condition_count = self->condition_count;
  self->steps = NULL;
  self->conditions = NULL;
  self->count = self->condition_count = 0;
  memset(&self->result, 0, sizeof self->result);
  for (Py_ssize_t i = 0; i < count; i++) {
    Py_CLEAR(steps[i].function);
    Py_CLEAR(steps[i].names);
    clear_expression(&steps[i].arguments);
  }
  PyMem_Free(steps);
  for (Py_ssize_t i = 0; i < condition_count; i++) {
    Py_CLEAR(conditions[i].object);
    Py_CLEAR(conditions[i].argument);
    Py_CLEAR(conditions[i].expected);
  }
  PyMem_Free(conditions);
  clear_expression(&result);
  Py_CLEAR(self->launches);
  Py_CLEAR(self->failed);
  Py_CLEAR(self->kept);
  return 0;
}

static int tape_traverse(Tape *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  for (Py_ssize_t i = 0; i < self->count; i++) {
    Py_VISIT(self->steps[i].function);
    Py_VISIT(self->steps[i].names);
    int stop = visit_expression(&self->steps[i].arguments, visit, arg);
    if (stop) return stop;
  }
  for (Py_ssize_t i = 0; i < self->condition_count; i++) {
    Py_VISIT(self->conditions[i].object);
    Py_VISIT(self->conditions[i].argument);
    Py_VISIT(self->conditions[i].expected);
  }
  Py_VISIT(self->launches);
  Py_VISIT(self->failed);
  Py_VISIT(self->kept);
  return visit_expression(&self->result, visit, arg);
}

static void tape_dealloc(Tape *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (self->weak_references != NULL) PyObject_ClearWeakRefs((PyObject *)self);
  tape_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

/* Read ("c", function, (argument,) or (), value), ("a", object, name, value), ("i", mapping, key,
   value or None), or one of these with the value's id() and True. */
static int read_condition(PyObject *text, Condition *made) {
  const char *kind;
  PyObject *object, *argument, *expected;
  int is_address = 0;
  if (!PyArg_ParseTuple(text, "sOOO|p", &kind, &object, &argument, &expected, &is_address))
    return 0;
  made->kind = kind[0];
  made->object = Py_NewRef(object);
  if (made->kind != 'c')
    made->argument = Py_NewRef(argument);
  else if (PyTuple_Check(argument) && PyTuple_GET_SIZE(argument) == 1)
    made->argument = Py_NewRef(PyTuple_GET_ITEM(argument, 0));
  if (is_address) {
    made->address = PyLong_AsVoidPtr(expected);
    return !PyErr_Occurred();
  }
  made->expected = Py_NewRef(expected);
  return 1;
}

/* Return 0 behind an error, which is no answer, and -1 with it if it is no Exception but says that
   the program is to end. */
static int without_answer(void) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
  PyErr_Clear();
  return 0;
}

/* Return whether something is as it was; an error is another answer. */
static int is_so(const Condition *made) {
  PyObject *found;
  if (made->kind == 'a') {
    found = PyObject_GetAttr(made->object, made->argument);
  } else if (made->kind == 'i') {
    found = PyDict_GetItemWithError(made->object, made->argument);
    if (found == NULL && !PyErr_Occurred()) found = Py_None;
    Py_XINCREF(found);
  } else {
    PyObject *values[2] = {NULL, made->argument};
    found = PyObject_Vectorcall(
        made->object, values + 1, (made->argument != NULL) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
  }
  if (found == NULL) return without_answer();
  int is_equal = made->expected == NULL ? found == made->address : found == made->expected;
  if (!is_equal && made->expected != NULL) {
    is_equal = PyObject_RichCompareBool(found, made->expected, Py_EQ);
    if (is_equal < 0) is_equal = without_answer();
  }
  Py_DECREF(found);
  return is_equal;
}

/* Tape(steps, result, slots, conditions, launches, failed, kept); a step is (function, ("tuple",
   ...), names, slots, kind). */
static int tape_init(Tape *self, PyObject *args, PyObject *names) {
  PyObject *steps, *result, *conditions, *launches, *failed, *kept;
  Py_ssize_t slots;
  if (!PyArg_ParseTuple(args, "O!O!nO!OOO", &PyTuple_Type, &steps, &PyTuple_Type, &result, &slots,
                        &PyTuple_Type, &conditions, &launches, &failed, &kept))
    return -1;
  if (slots > MOST_SLOTS) {
    PyErr_SetString(PyExc_ValueError, "a tape has too many slots");
    return -1;
  }
  self->slots = slots;
  self->steps = PyMem_Calloc(PyTuple_GET_SIZE(steps) + 1, sizeof(Step));
  self->conditions = PyMem_Calloc(PyTuple_GET_SIZE(conditions) + 1, sizeof(Condition));
  if (self->steps == NULL || self->conditions == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  self->launches = Py_NewRef(launches);
  self->failed = Py_NewRef(failed);
  self->kept = Py_NewRef(kept);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(conditions); i++) {
    self->condition_count = i + 1;
    if (!read_condition(PyTuple_GET_ITEM(conditions, i), &self->conditions[i])) return -1;
  }
  if (!read_expression(result, &self->result)) return -1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); i++) {
    Step *step = &self->steps[i];
    PyObject *function, *arguments, *keywords, *results;
    const char *kind;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps, i), "OO!OO!s", &function, &PyTuple_Type,
                          &arguments, &keywords, &PyTuple_Type, &results, &kind))
      return -1;
    self->count = i + 1;
    step->function = Py_NewRef(function);
    step->names = keywords == Py_None ? NULL : Py_NewRef(keywords);
    step->kind = kind[0];
    step->results = PyTuple_GET_SIZE(results);
    if (step->results) step->slot = PyLong_AsSsize_t(PyTuple_GET_ITEM(results, 0));
    if (PyErr_Occurred() || !read_expression(arguments, &step->arguments)) return -1;
    if (step->arguments.length > MOST_ARGUMENTS || step->slot + step->results > slots) {
      PyErr_SetString(PyExc_ValueError, "a step has too many arguments, or a slot of no tape");
      return -1;
    }
  }
  return 0;
}

static PyObject *tape_close(Tape *self, PyObject *unused) {
  self->is_closed = 1;
  if (!self->playing) tape_clear(self);
  Py_RETURN_NONE;
}

static int count_launch(PyObject *launches) {
  PyObject *before = PyObject_GetAttr(launches, value_name);
  if (before == NULL) return 0;
  PyObject *one = PyLong_FromLong(1);
  PyObject *after = one == NULL ? NULL : PyNumber_Add(before, one);
  int is_set = after != NULL && PyObject_SetAttr(launches, value_name, after) == 0;
  Py_XDECREF(after);
  Py_XDECREF(one);
  Py_DECREF(before);
  return is_set;
}

/* Tell a tape that a call of it has ended with the error that is set, behind a launch. */
static void tell_failed(Tape *tape) {
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  PyObject *told = PyObject_CallOneArg(tape->failed, error == NULL ? Py_None : error);
  if (told == NULL) PyErr_WriteUnraisable(tape->failed);
  Py_XDECREF(told);
  PyErr_Restore(type, error, traceback);
}

/* Put what a step returns into its slots, and give up the reference to it. */
static int keep_result(const Step *step, PyObject *result, PyObject **slots) {
  int is_tuple = PyTuple_Check(result), is_kept = step->results == 0;
  if (step->results == 1 && !is_tuple) {
    slots[step->slot] = Py_NewRef(result);
    is_kept = 1;
  } else if (step->results && is_tuple && PyTuple_GET_SIZE(result) == step->results) {
    for (Py_ssize_t i = 0; i < step->results; i++)
      slots[step->slot + i] = Py_NewRef(PyTuple_GET_ITEM(result, i));
    is_kept = 1;
  }
  if (!is_kept) PyErr_SetString(PyExc_TypeError, "a step returns as many tensors as before");
  Py_DECREF(result);
  return is_kept;
}

/* Return 0 with an error, or without one for an attempt that has done nothing. */
static int run_step(const Step *step, PyObject **slots) {
  /* The first place is the callee's. */
  PyObject *values[MOST_ARGUMENTS + 1];
  Py_ssize_t length = step->arguments.length, made = 0;
  for (; made < length; made++) {
    values[made + 1] = value_of(&step->arguments.of[made], slots);
    if (values[made + 1] == NULL) break;
  }
  PyObject *result = NULL;
  if (made == length) {
    Py_ssize_t named = step->names == NULL ? 0 : PyTuple_GET_SIZE(step->names);
    result = PyObject_Vectorcall(step->function, values + 1,
                                 (size_t)(length - named) | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                 step->names);
  }
  for (Py_ssize_t i = 0; i < made; i++) Py_DECREF(values[i + 1]);
  if (result == NULL) return 0;
  if (step->kind == 'a' && result == Py_None) {
    Py_DECREF(result);
    return 0;
  }
  return keep_result(step, result, slots);
}

static void end(Tape *tape) {
  if (--tape->playing == 0 && tape->is_closed) tape_clear(tape);
  Py_DECREF(tape);
}

/* Leave a context whose end does not depend on an error, and keep the error that is set. */
static void leave(PyObject *context) {
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyObject *none[] = {context, Py_None, Py_None, Py_None};
  PyObject *left = PyObject_VectorcallMethod(exit_name, none, 4, NULL);
  if (left == NULL) PyErr_WriteUnraisable(context);
  Py_XDECREF(left);
  PyErr_Restore(type, error, traceback);
}

/* Make a call by its tape; return NULL with an error, or NULL without one if it must take the long
   way. */
static PyObject *play(Tape *tape, PyObject *const *args, Py_ssize_t count) {
  Py_INCREF(tape);
  tape->playing++;
  /* Whatever runs here may close the tape, which keeps what it has as long as it is played. */
  int launched = 0, is_permitted = 1, is_done = 1;
  for (Py_ssize_t i = 0; i < tape->condition_count && is_permitted > 0; i++)
    is_permitted = is_so(&tape->conditions[i]);
  if (is_permitted <= 0 || tape->is_closed) {
    tape->refusals++;
    end(tape);
    return NULL;
  }
  tape->refusals = 0;
  PyObject *plain = PyObject_CallNoArgs(as_plain), *entered = NULL;
  if (plain != NULL) entered = PyObject_CallMethodNoArgs(plain, enter_name);
  is_done = entered != NULL;
  PyObject *slots[MOST_SLOTS];
  for (Py_ssize_t i = 0; i < tape->slots; i++) slots[i] = i < count ? args[i] : NULL;
  for (Py_ssize_t i = 0; i < tape->count && is_done; i++) {
    if (tape->steps[i].kind == 'l') {
      /* Counted before the launch: if that is interrupted, the kernel may be running. */
      launched = 1;
      is_done = count_launch(tape->launches);
    }
    is_done = is_done && run_step(&tape->steps[i], slots);
  }
  PyObject *result = is_done ? value_of(&tape->result, slots) : NULL;
  if (result == NULL && launched) tell_failed(tape);
  for (Py_ssize_t i = count; i < tape->slots; i++) Py_XDECREF(slots[i]);
  if (entered != NULL) leave(plain);
  Py_XDECREF(entered);
  Py_XDECREF(plain);
  end(tape);
  return result;
}

static PyMethodDef tape_methods[] = {
    {"close", (PyCFunction)tape_close, METH_NOARGS, "Be played no more, and let go of everything."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef tape_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Tape, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot tape_slots[] = {
    {Py_tp_init, tape_init},
    {Py_tp_dealloc, tape_dealloc},
    {Py_tp_traverse, tape_traverse},
    {Py_tp_clear, tape_clear},
    {Py_tp_methods, tape_methods},
    {Py_tp_members, tape_members},
    {0, NULL},
};

static PyType_Spec tape_spec = {
    "interlace_player.Tape", sizeof(Tape), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tape_slots,
};

static PyTypeObject *tape_type;

/* Players */

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *call, *record; /* the long way, and the same with a recording, given a key */
  PyObject *tapes; /* by key; the number of calls where there is no tape */
  int is_public;
} Player;

static PyObject *call_recording(Player *self, PyObject *key, PyObject *const *args,
                                Py_ssize_t count) {
  PyObject *arguments = PyTuple_New(count + 1);
  if (arguments == NULL) return NULL;
  PyTuple_SET_ITEM(arguments, 0, Py_NewRef(key));
  for (Py_ssize_t i = 0; i < count; i++) PyTuple_SET_ITEM(arguments, i + 1, Py_NewRef(args[i]));
  PyObject *result = PyObject_CallObject(self->record, arguments);
  Py_DECREF(arguments);
  return result;
}

static PyObject *player_call(PyObject *object, PyObject *const *args, size_t flags,
                             PyObject *names) {
  Player *self = (Player *)object;
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  Key key;
  key.length = key.has_gradients = 0;
  int is_known = names == NULL && count < MOST_SLOTS;
  for (Py_ssize_t i = 0; is_known && i < count; i++)
    is_known = put_argument(&key, args[i], self->is_public);
  if (is_known && self->is_public) is_known = put_mode(&key);
  if (!is_known) return PyObject_Vectorcall(self->call, args, flags, names);
  PyObject *bytes = PyBytes_FromStringAndSize(key.bytes, key.length), *result = NULL;
  if (bytes == NULL) return NULL;
  PyObject *found = PyDict_GetItemWithError(self->tapes, bytes);
  if (found == NULL && PyErr_Occurred()) goto done;
  if (found != NULL && Py_TYPE(found) == tape_type && !((Tape *)found)->is_closed) {
    Py_INCREF(found);
    result = play((Tape *)found, args, count);
    int takes_long_way = result == NULL && !PyErr_Occurred();
    /* What must be so may never be so again, as calls run on another stream. */
    if (takes_long_way && ((Tape *)found)->refusals >= MOST_REFUSALS)
      Py_XDECREF(tape_close((Tape *)found, NULL));
    Py_DECREF(found);
    if (takes_long_way)
      result = PyObject_Vectorcall(self->call, args, flags, names);
    goto done;
  }
  /* A closed tape begins anew. */
  long calls = found != NULL && PyLong_CheckExact(found) ? PyLong_AsLong(found) + 1 : 1;
  if (found == NULL && PyDict_GET_SIZE(self->tapes) >= MOST_KEYS) PyDict_Clear(self->tapes);
  PyObject *number = PyLong_FromLong(calls);
  if (number == NULL || PyDict_SetItem(self->tapes, bytes, number) < 0) {
    Py_XDECREF(number);
    goto done;
  }
  Py_DECREF(number);
  /* Two calls are recorded, which must be alike: the second and third, or those from 4, 8, ... */
  int is_first = calls >= FIRST_TRY && (calls & (calls - 1)) == 0;
  int is_second = calls > FIRST_TRY && ((calls - 1) & (calls - 2)) == 0;
  result = is_first || is_second ? call_recording(self, bytes, args, count)
                                 : PyObject_Vectorcall(self->call, args, flags, names);
done:
  Py_DECREF(bytes);
  return result;
}

static PyObject *player_keep(Player *self, PyObject *args) {
  PyObject *key, *tape;
  if (!PyArg_ParseTuple(args, "O!O!", &PyBytes_Type, &key, tape_type, &tape)) return NULL;
  if (PyDict_SetItem(self->tapes, key, tape) < 0) return NULL;
  Py_RETURN_NONE;
}

static int player_traverse(Player *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->call);
  Py_VISIT(self->record);
  Py_VISIT(self->tapes);
  return 0;
}

static int player_clear(Player *self) {
  Py_CLEAR(self->call);
  Py_CLEAR(self->record);
  Py_CLEAR(self->tapes);
  return 0;
}

static void player_dealloc(Player *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  player_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

/* Player(call, record, is_public) */
static int player_init(Player *self, PyObject *args, PyObject *names) {
  PyObject *call, *record;
  if (!PyArg_ParseTuple(args, "OOp", &call, &record, &self->is_public)) return -1;
  self->vectorcall = player_call;
  self->call = Py_NewRef(call);
  self->record = Py_NewRef(record);
  self->tapes = PyDict_New();
  return self->tapes == NULL ? -1 : 0;
}

static PyMethodDef player_methods[] = {
    {"keep", (PyCFunction)player_keep, METH_VARARGS, "Play calls of a key by a tape from here on."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef player_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Player, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot player_slots[] = {
    {Py_tp_init, player_init},
    {Py_tp_dealloc, player_dealloc},
    {Py_tp_traverse, player_traverse},
    {Py_tp_clear, player_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_methods, player_methods},
    {Py_tp_members, player_members},
    {0, NULL},
};

static PyType_Spec player_spec = {
    "interlace_player.Player", sizeof(Player), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, player_slots,
};

static PyMethodDef methods[] = {
    {"init", init, METH_VARARGS, "Take PyTorch's types and functions."},
    {NULL, NULL, 0, NULL},
};

/* Types of PyTorch hold on to its modules, and those to others, at the end of Python as well. */
static int clear_module(PyObject *module) {
  Py_CLEAR(tensor_type);
  Py_CLEAR(parameter_type);
  Py_CLEAR(dtype_type);
  Py_CLEAR(group_type);
  Py_CLEAR(as_plain);
  Py_CLEAR(strided);
  Py_CLEAR(is_grad_enabled);
  return 0;
}

static void free_module(void *module) { clear_module(module); }

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "interlace_player", NULL, -1, methods, NULL, NULL, clear_module,
    free_module,
};

PyMODINIT_FUNC PyInit_interlace_player(void) {
  PyObject *module = PyModule_Create(&module_def);
  if (module == NULL) return NULL;
  tape_type = (PyTypeObject *)PyType_FromSpec(&tape_spec);
  PyObject *player_type = PyType_FromSpec(&player_spec);
  if (tape_type == NULL || player_type == NULL ||
      PyModule_AddObjectRef(module, "Tape", (PyObject *)tape_type) < 0 ||
      PyModule_AddObjectRef(module, "Player", player_type) < 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
