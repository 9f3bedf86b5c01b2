/* One pass over the slots of a chain: find, pin, unpin and name them. kvservice/core/store/pins.py has the same loops in
 * Python, says what they do, and decides which are used.
 *
 * A slot is an object with __slots__, of the class that `bind` was given. Its attributes lie at fixed places in it, which
 * their descriptors tell, so reading one is as cheap as in a struct. Anything that is no such object, or has no such
 * value, is an exception, and never read. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>

enum { INDEX, PAYLOAD_BYTES, GENERATION, STATE, PINS, ATTRIBUTES };
static const char *const NAMES[ATTRIBUTES] = {"index", "payload_bytes", "generation", "state", "pins"};

static PyTypeObject *slot_type; /* NULL until `bind` */
static Py_ssize_t places[ATTRIBUTES];
static PyObject *sealed, *leased, *invalid;

#define AT(slot, attribute) (*(PyObject **)((char *)(slot) + places[attribute]))

static PyObject *pins_bind(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *type, *without_pins, *with_pins, *error;
    Py_ssize_t found[ATTRIBUTES];
    if (!PyArg_ParseTuple(args, "O!OOO", &PyType_Type, &type, &without_pins, &with_pins, &error))
        return NULL;
    for (int number = 0; number < ATTRIBUTES; number++) {
        PyObject *descriptor = PyObject_GetAttrString(type, NAMES[number]);
        if (!descriptor)
            return NULL;
        int is_member = Py_TYPE(descriptor) == &PyMemberDescr_Type &&
                        PyDescr_TYPE(descriptor) == (PyTypeObject *)type &&
                        ((PyMemberDescrObject *)descriptor)->d_member->type == T_OBJECT_EX;
        if (is_member)
            found[number] = ((PyMemberDescrObject *)descriptor)->d_member->offset;
        Py_DECREF(descriptor);
        if (!is_member) {
            PyErr_Format(PyExc_TypeError, "%s is no slot of %R", NAMES[number], type);
            return NULL;
        }
    }
    memcpy(places, found, sizeof places);
    Py_INCREF(type);
    Py_XSETREF(slot_type, (PyTypeObject *)type);
    Py_INCREF(without_pins);
    Py_XSETREF(sealed, without_pins);
    Py_INCREF(with_pins);
    Py_XSETREF(leased, with_pins);
    Py_INCREF(error);
    Py_XSETREF(invalid, error);
    Py_RETURN_NONE;
}

/* Whether this is a slot with all of its attributes; else there is an exception. */
static int is_slot(PyObject *object)
{
    if (slot_type && Py_TYPE(object) == slot_type) {
        int has_all = 1;
        for (int number = 0; number < ATTRIBUTES; number++)
            has_all &= AT(object, number) != NULL;
        if (has_all && PyLong_CheckExact(AT(object, PINS)))
            return 1;
    }
    PyErr_Format(PyExc_TypeError, "a %s that is no whole slot", Py_TYPE(object)->tp_name);
    return 0;
}

static void set_place(PyObject *slot, int attribute, PyObject *owned)
{
    PyObject *old = AT(slot, attribute);
    AT(slot, attribute) = owned;
    Py_XDECREF(old);
}

static void set_state(PyObject *slot, PyObject *state)
{
    Py_INCREF(state);
    set_place(slot, STATE, state);
}

/* leading(slots, keys, payload_bytes) */
static PyObject *pins_leading(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *slots, *keys, *size;
    if (!PyArg_ParseTuple(args, "O!OO!", &PyDict_Type, &slots, &keys, &PyLong_Type, &size))
        return NULL;
    PyObject *sequence = PySequence_Fast(keys, "keys are a sequence");
    if (!sequence)
        return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found && i < PySequence_Fast_GET_SIZE(sequence); i++) {
        PyObject *slot = PyDict_GetItemWithError(slots, PySequence_Fast_GET_ITEM(sequence, i));
        if (!slot) {
            if (PyErr_Occurred())
                Py_CLEAR(found);
            break;
        }
        if (!is_slot(slot)) {
            Py_CLEAR(found);
            break;
        }
        PyObject *own = AT(slot, PAYLOAD_BYTES);
        int is_same = own == size ? 1 : PyObject_RichCompareBool(own, size, Py_EQ);
        if (is_same < 0 || (is_same && PyList_Append(found, slot)))
            Py_CLEAR(found);
        if (is_same <= 0)
            break;
    }
    Py_DECREF(sequence);
    return found;
}

/* Add `change` readers to each slot. Returns those whose first one came, or whose last one went. */
static PyObject *add_pins(PyObject *slots, long change)
{
    PyObject *sequence = PySequence_Fast(slots, "slots are a sequence");
    if (!sequence)
        return NULL;
    PyObject *changed = PyList_New(0);
    for (Py_ssize_t i = 0; changed && i < PySequence_Fast_GET_SIZE(sequence); i++) {
        PyObject *slot = PySequence_Fast_GET_ITEM(sequence, i);
        if (!is_slot(slot)) {
            Py_CLEAR(changed);
            break;
        }
        long before = PyLong_AsLong(AT(slot, PINS)), after = before + change;
        int is_edge = before == 0 || after == 0;
        if (before == -1 && PyErr_Occurred()) {
            Py_CLEAR(changed);
            break;
        }
        if (after < 0) {
            PyErr_Format(PyExc_AssertionError, "unpinned too often: %R", slot);
            Py_CLEAR(changed);
            break;
        }
        if (!before && AT(slot, STATE) != sealed) {
            PyObject *value = PyObject_GetAttrString(AT(slot, STATE), "value");
            if (value)
                PyErr_Format(invalid, "slot %S is %S, cannot pin: %R", AT(slot, INDEX), value, slot);
            Py_XDECREF(value);
            Py_CLEAR(changed);
            break;
        }
        PyObject *number = PyLong_FromLong(after);
        if (!number || (is_edge && PyList_Append(changed, slot))) {
            Py_XDECREF(number);
            Py_CLEAR(changed);
            break;
        }
        set_place(slot, PINS, number);
        if (is_edge)
            set_state(slot, after ? leased : sealed);
    }
    Py_DECREF(sequence);
    return changed;
}

static PyObject *pins_pin(PyObject *module, PyObject *slots)
{
    (void)module;
    return add_pins(slots, 1);
}

static PyObject *pins_unpin(PyObject *module, PyObject *slots)
{
    (void)module;
    return add_pins(slots, -1);
}

/* sizes(slots) */
static PyObject *pins_sizes(PyObject *module, PyObject *slots)
{
    (void)module;
    PyObject *sequence = PySequence_Fast(slots, "slots are a sequence");
    if (!sequence)
        return NULL;
    PyObject *counts = PyDict_New();
    Py_ssize_t end = PySequence_Fast_GET_SIZE(sequence);
    for (Py_ssize_t i = 0; counts && i < end;) {
        PyObject *slot = PySequence_Fast_GET_ITEM(sequence, i);
        if (!is_slot(slot)) {
            Py_CLEAR(counts);
            break;
        }
        PyObject *size = AT(slot, PAYLOAD_BYTES); /* the same object in all slots of one slab */
        Py_ssize_t begin = i;
        while (++i < end) {
            PyObject *next = PySequence_Fast_GET_ITEM(sequence, i);
            if (Py_TYPE(next) != slot_type || AT(next, PAYLOAD_BYTES) != size)
                break;
        }
        PyObject *known = PyDict_GetItemWithError(counts, size);
        PyObject *number = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(i - begin + (known ? PyLong_AsSsize_t(known) : 0));
        if (!number || PyDict_SetItem(counts, size, number))
            Py_CLEAR(counts);
        Py_XDECREF(number);
    }
    Py_DECREF(sequence);
    return counts;
}

static int put_number(unsigned char *target, PyObject *number)
{
    uint64_t value = PyLong_AsUnsignedLongLong(number);
    if (value == (uint64_t)-1 && PyErr_Occurred())
        return -1;
    for (int byte = 0; byte < 8; byte++)
        target[byte] = (unsigned char)(value >> (8 * byte));
    return 0;
}

/* refs(slots) */
static PyObject *pins_refs(PyObject *module, PyObject *slots)
{
    (void)module;
    PyObject *sequence = PySequence_Fast(slots, "slots are a sequence");
    if (!sequence)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, 16 * count);
    for (Py_ssize_t i = 0; packed && i < count; i++) {
        PyObject *slot = PySequence_Fast_GET_ITEM(sequence, i);
        unsigned char *target = (unsigned char *)PyBytes_AS_STRING(packed) + 16 * i;
        if (!is_slot(slot) || put_number(target, AT(slot, INDEX)) || put_number(target + 8, AT(slot, GENERATION)))
            Py_CLEAR(packed);
    }
    Py_DECREF(sequence);
    return packed;
}

static PyMethodDef methods[] = {
    {"bind", pins_bind, METH_VARARGS, "bind(type, sealed, leased, error)"},
    {"leading", pins_leading, METH_VARARGS, "leading(slots, keys, payload_bytes)"},
    {"pin", pins_pin, METH_O, "pin(slots)"},
    {"unpin", pins_unpin, METH_O, "unpin(slots)"},
    {"sizes", pins_sizes, METH_O, "sizes(slots)"},
    {"refs", pins_refs, METH_O, "refs(slots)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pins", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pins(void)
{
    return PyModule_Create(&definition);
}
