/* The reading side of kvservice.core.block_table, for installations that could compile it. The layout is described
 * there, and the same in numpy; tests hold the two equal. Reads memory that another process may be writing: what it finds
 * may be torn, so every address is derived from checked numbers and every loop is bounded. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define ENTRIES 7
#define ROW_WORDS 18
#define ROW_U32 (2 * ROW_WORDS)
#define FIRST_NUMBER (4 * ENTRIES)
#define OVERFLOW_AT (FIRST_NUMBER + ENTRIES)
#define PROBES 32
#define AHEAD 24 /* keys whose rows are on their way from memory */

static inline uint64_t home_of(uint64_t first, uint64_t second, uint64_t mixer, uint64_t rows, uint64_t mask)
{
    uint64_t mixed = first ^ (second * UINT64_C(0x9E3779B97F4A7C15));
    mixed ^= mixed >> 32;
    mixed = (mixed * mixer) >> 32;
    uint64_t home = mixed & mask;
    return home < rows ? home : mixed & (mask >> 1);
}

static inline void fetch(const uint64_t *row)
{
    __builtin_prefetch(row);
    __builtin_prefetch(row + 8);
    __builtin_prefetch(row + ROW_WORDS - 1);
}

/* Index of the key's number as u32, or -1; the number in *number, 0 when it is not there. */
static inline int64_t find_one(const uint64_t *body, uint64_t home, uint64_t first, uint64_t second, uint32_t *number)
{
    const uint64_t *row = body + home * ROW_WORDS;
    for (int probe = 0; probe < PROBES; probe++, row += ROW_WORDS) {
        const uint32_t *cells = (const uint32_t *)row;
        for (int entry = 0; entry < ENTRIES; entry++) {
            if (row[entry] == first && row[ENTRIES + entry] == second) {
                uint32_t found = cells[FIRST_NUMBER + entry];
                if (found) {
                    *number = found;
                    return (int64_t)((home + (uint64_t)probe) * ROW_U32 + FIRST_NUMBER + (uint64_t)entry);
                }
            }
        }
        if (!cells[OVERFLOW_AT])
            break;
    }
    *number = 0;
    return -1;
}

static PyObject *probe_find(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "find(body, rows, mixer, keys, numbers, positions)");
        return NULL;
    }
    unsigned long long rows = PyLong_AsUnsignedLongLong(given[1]);
    if (rows == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    unsigned long long mixer = PyLong_AsUnsignedLongLong(given[2]);
    if (mixer == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    Py_buffer body, keys, out;
    int want_positions = given[5] != Py_None;
    if (PyObject_GetBuffer(given[0], &body, PyBUF_SIMPLE))
        return NULL;
    if (PyObject_GetBuffer(given[3], &keys, PyBUF_SIMPLE)) {
        PyBuffer_Release(&body);
        return NULL;
    }
    if (PyObject_GetBuffer(want_positions ? given[5] : given[4], &out, PyBUF_WRITABLE)) {
        PyBuffer_Release(&body);
        PyBuffer_Release(&keys);
        return NULL;
    }
    size_t asked = (size_t)keys.len / 16;
    int fits = rows > 0 && rows < (UINT64_C(1) << 40) &&
               (rows + PROBES - 1) * ROW_WORDS * 8 <= (uint64_t)body.len &&
               (size_t)out.len >= asked * (want_positions ? 8 : 4) && (uintptr_t)body.buf % 8 == 0;
    if (fits) {
        const uint64_t *words = body.buf;
        const char *packed = keys.buf;
        uint64_t mask = 1;
        while (mask <= rows)
            mask <<= 1;
        mask -= 1;
        uint64_t first[AHEAD], second[AHEAD], home[AHEAD];
        for (size_t next = 0; next < asked + AHEAD; next++) {
            size_t place = next % AHEAD;
            if (next >= AHEAD) {
                size_t done = next - AHEAD;
                uint32_t number;
                int64_t at = find_one(words, home[place], first[place], second[place], &number);
                if (want_positions)
                    ((int64_t *)out.buf)[done] = at;
                else
                    ((uint32_t *)out.buf)[done] = number;
            }
            if (next < asked) {
                memcpy(&first[place], packed + 16 * next, 8);
                memcpy(&second[place], packed + 16 * next + 8, 8);
                home[place] = home_of(first[place], second[place], mixer, rows, mask);
                fetch(words + home[place] * ROW_WORDS);
            }
        }
    }
    PyBuffer_Release(&body);
    PyBuffer_Release(&keys);
    PyBuffer_Release(&out);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "rows, keys and results do not fit each other");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"find", (PyCFunction)(void (*)(void))probe_find, METH_FASTCALL,
     "find(body, rows, mixer, keys, numbers, positions): fills `numbers` (u32), or `positions` (i64) when that is not None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_probe", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__probe(void)
{
    return PyModule_Create(&definition);
}
