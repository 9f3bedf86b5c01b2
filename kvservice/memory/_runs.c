/* Copies many runs of bytes in one call, with the interpreter's lock released. See kvservice.memory.runs. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

static PyObject *runs_copy(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long target_base, source_base;
    Py_buffer targets, sources, lengths;
    if (!PyArg_ParseTuple(args, "KKy*y*y*", &target_base, &source_base, &targets, &sources, &lengths))
        return NULL;
    Py_ssize_t count = lengths.len / (Py_ssize_t)sizeof(int64_t);
    int is_sound = targets.len == lengths.len && sources.len == lengths.len &&
                   lengths.len % (Py_ssize_t)sizeof(int64_t) == 0;
    const int64_t *to = targets.buf, *from = sources.buf, *length = lengths.buf;
    for (Py_ssize_t i = 0; is_sound && i < count; i++)
        is_sound = length[i] >= 0;
    if (is_sound) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++)
            memcpy((void *)(uintptr_t)(target_base + (uint64_t)to[i]),
                   (const void *)(uintptr_t)(source_base + (uint64_t)from[i]), (size_t)length[i]);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&targets);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&lengths);
    if (!is_sound) {
        PyErr_SetString(PyExc_ValueError, "targets, sources and lengths are int64 arrays of one size, lengths not negative");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", runs_copy, METH_VARARGS, "copy(target_base, source_base, targets, sources, lengths)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_runs", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__runs(void) { return PyModule_Create(&definition); }
