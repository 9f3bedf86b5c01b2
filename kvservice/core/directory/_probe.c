/* kvservice.core.directory.key_table's loops, for installations that could compile them. The layout is described there, with
 * the same loops in Python; tests hold the two equal. `find` reads memory that another process may be writing: what it finds may be
 * torn, so every address is derived from checked numbers and every loop is bounded. */

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

/* The table that a call was given. `words` is NULL after an error, which is then set. */
typedef struct {
    Py_buffer body;
    uint64_t *words;
    uint64_t rows, mixer, mask;
} Table;

static Table open_table(PyObject *const *given, Py_ssize_t count, int flags, const char *usage)
{
    Table table = {.words = NULL};
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, usage);
        return table;
    }
    table.rows = PyLong_AsUnsignedLongLong(given[1]);
    if (table.rows == UINT64_MAX && PyErr_Occurred())
        return table;
    table.mixer = PyLong_AsUnsignedLongLong(given[2]);
    if (table.mixer == UINT64_MAX && PyErr_Occurred())
        return table;
    if (PyObject_GetBuffer(given[0], &table.body, flags))
        return table;
    if (table.rows == 0 || table.rows >= (UINT64_C(1) << 40) || (uintptr_t)table.body.buf % 8 != 0 ||
        (table.rows + PROBES - 1) * ROW_WORDS * 8 > (uint64_t)table.body.len) {
        PyBuffer_Release(&table.body);
        PyErr_SetString(PyExc_ValueError, "rows do not fit the table");
        return table;
    }
    table.words = table.body.buf;
    table.mask = 1;
    while (table.mask <= table.rows)
        table.mask <<= 1;
    table.mask -= 1;
    return table;
}

typedef struct {
    uint64_t first, second, home;
} Key;

static inline Key key_at(const Table *table, const char *packed, size_t index)
{
    Key key;
    memcpy(&key.first, packed + 16 * index, 8);
    memcpy(&key.second, packed + 16 * index + 8, 8);
    key.home = home_of(key.first, key.second, table->mixer, table->rows, table->mask);
    return key;
}

typedef void (*Visit)(const Table *table, Key key, size_t index, void *context);

/* Calls `visit` for each key in turn, when its row is on its way from memory. Inlined with the function it is given. */
static inline __attribute__((always_inline)) void each_key(
    const Table *table, const char *packed, size_t count, Visit visit, void *context)
{
    Key ahead[AHEAD];
    for (size_t next = 0; next < count + AHEAD; next++) {
        Key *place = &ahead[next % AHEAD];
        if (next >= AHEAD)
            visit(table, *place, next - AHEAD, context);
        if (next < count) {
            *place = key_at(table, packed, next);
            fetch(table->words + place->home * ROW_WORDS);
        }
    }
}

static void sizes_differ(void)
{
    PyErr_SetString(PyExc_ValueError, "keys and results do not fit each other");
}

/* Index of the key's number as u32, or -1; the number in *number, 0 when it is not there. */
static inline int64_t find_one(const uint64_t *body, Key key, uint32_t *number)
{
    const uint64_t *row = body + key.home * ROW_WORDS;
    for (int probe = 0; probe < PROBES; probe++, row += ROW_WORDS) {
        const uint32_t *cells = (const uint32_t *)row;
        for (int entry = 0; entry < ENTRIES; entry++) {
            if (row[entry] == key.first && row[ENTRIES + entry] == key.second) {
                uint32_t found = cells[FIRST_NUMBER + entry];
                if (found) {
                    *number = found;
                    return (int64_t)((key.home + (uint64_t)probe) * ROW_U32 + FIRST_NUMBER + (uint64_t)entry);
                }
            }
        }
        if (!cells[OVERFLOW_AT])
            break;
    }
    *number = 0;
    return -1;
}

static inline void give_number(const Table *table, Key key, size_t index, void *numbers)
{
    find_one(table->words, key, (uint32_t *)numbers + index);
}

static inline void give_position(const Table *table, Key key, size_t index, void *positions)
{
    uint32_t number;
    ((int64_t *)positions)[index] = find_one(table->words, key, &number);
}

static PyObject *probe_find(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    Table table = open_table(given, count, PyBUF_SIMPLE, "find(body, rows, mixer, keys, numbers, positions)");
    if (table.words == NULL)
        return NULL;
    Py_buffer keys = {0}, out = {0};
    PyObject *answer = NULL;
    int want_positions = given[5] != Py_None;
    if (PyObject_GetBuffer(given[3], &keys, PyBUF_SIMPLE) ||
        PyObject_GetBuffer(given[want_positions ? 5 : 4], &out, PyBUF_WRITABLE))
        goto end;
    size_t asked = (size_t)keys.len / 16;
    if ((size_t)out.len < asked * (want_positions ? 8 : 4)) {
        sizes_differ();
        goto end;
    }
    if (want_positions)
        each_key(&table, keys.buf, asked, give_position, out.buf);
    else
        each_key(&table, keys.buf, asked, give_number, out.buf);
    answer = Py_NewRef(Py_None);
end:
    PyBuffer_Release(&keys);
    PyBuffer_Release(&out);
    PyBuffer_Release(&table.body);
    return answer;
}

/* Puts a key that is not there into the first free entry from its home on. 0 when there is none. */
static int insert_one(uint64_t *body, Key key, uint32_t number)
{
    for (uint64_t at = key.home; at < key.home + PROBES; at++) {
        uint64_t *row = body + at * ROW_WORDS;
        uint32_t *cells = (uint32_t *)row;
        for (int entry = 0; entry < ENTRIES; entry++) {
            if (cells[FIRST_NUMBER + entry])
                continue;
            row[entry] = key.first;
            row[ENTRIES + entry] = key.second;
            for (uint64_t passed = key.home; passed < at; passed++)
                ((uint32_t *)(body + passed * ROW_WORDS))[OVERFLOW_AT] += 1;
            /* Readers in other processes take an entry for one when its number is there. */
            __atomic_store_n(&cells[FIRST_NUMBER + entry], number, __ATOMIC_RELEASE);
            return 1;
        }
    }
    return 0;
}

typedef struct {
    const uint32_t *numbers;
    uint8_t *done;
    size_t count;
} Inserted;

static inline void insert_key(const Table *table, Key key, size_t index, void *context)
{
    Inserted *inserted = context;
    int fits = insert_one(table->words, key, inserted->numbers[index]);
    inserted->done[index] = (uint8_t)fits;
    inserted->count += (size_t)fits;
}

static PyObject *probe_insert(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    Table table = open_table(given, count, PyBUF_WRITABLE, "insert(body, rows, mixer, keys, numbers, done)");
    if (table.words == NULL)
        return NULL;
    Py_buffer keys = {0}, numbers = {0}, done = {0};
    PyObject *answer = NULL;
    if (PyObject_GetBuffer(given[3], &keys, PyBUF_SIMPLE) || PyObject_GetBuffer(given[4], &numbers, PyBUF_SIMPLE) ||
        PyObject_GetBuffer(given[5], &done, PyBUF_WRITABLE))
        goto end;
    size_t asked = (size_t)keys.len / 16;
    if ((size_t)numbers.len < asked * 4 || (size_t)done.len < asked) {
        sizes_differ();
        goto end;
    }
    Inserted inserted = {numbers.buf, done.buf, 0};
    each_key(&table, keys.buf, asked, insert_key, &inserted);
    answer = PyLong_FromSize_t(inserted.count);
end:
    PyBuffer_Release(&keys);
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&done);
    PyBuffer_Release(&table.body);
    return answer;
}

static PyMethodDef methods[] = {
    {"find", (PyCFunction)(void (*)(void))probe_find, METH_FASTCALL,
     "find(body, rows, mixer, keys, numbers, positions): fills `numbers` (u32), or `positions` (i64) when that is not None."},
    {"insert", (PyCFunction)(void (*)(void))probe_insert, METH_FASTCALL,
     "insert(body, rows, mixer, keys, numbers, done): adds keys that are not there, all different; `done` (u8) tells which\n"
     "had room. Returns how many."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_probe", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__probe(void)
{
    return PyModule_Create(&definition);
}
