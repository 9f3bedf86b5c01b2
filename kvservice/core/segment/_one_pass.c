/* Copies runs of bytes, with the digest of each block in the same pass (kvservice.core.segment.digest), and checks the
 * checksums of many headers (kvservice.core.segment.header_checks).
 *
 * The digest is XXH3, 64 bits, with a seed, for more than 240 bytes. It is written from the specification of the algorithm
 * (xxHash, doc/xxhash_spec.md, by Yann Collet), not taken from its library, whose header no package registry brings. The
 * library is what this is held against when the module is loaded. A block is 64-byte stripes: each is read once, stored, and
 * added to eight accumulators. Stores go past the caches where the target is aligned, because nobody reads the bytes soon.
 *
 * Memory that is mapped from a file can go away: then the kernel sends SIGBUS. Every copy here ends with an error instead. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the digest reads words as little endian: without this module Python does the same"
#endif

#define STRIPE 64
#define LANES 8
#define SECRET_BYTES 192
#define STRIPES_OF_BLOCK 16 /* (SECRET_BYTES - STRIPE) / 8; then the accumulators are scrambled */
#define SHORT_BYTES 240     /* up to here XXH3 is another function */
#define AHEAD 1024          /* bytes that are asked for before they are read */

static const uint64_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87U, PRIME64_2 = 0xC2B2AE3D27D4EB4FU, PRIME64_3 = 0x165667B19E3779F9U,
                      PRIME64_4 = 0x85EBCA77C2B2AE63U, PRIME64_5 = 0x27D4EB2F165667C5U, PRIME_MX1 = 0x165667919E3779F9U;

static const uint8_t DEFAULT_SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90,
    0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d,
    0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28,
    0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38,
    0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f,
    0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55,
    0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45,
    0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t word_at(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* -- stripes ----
 * Copies `count` stripes and adds them to the accumulators. `first` is the number of the first one in its block of 16. */

typedef void (*Stripes)(uint64_t *sums, const uint8_t *from, uint8_t *to, size_t count, size_t first, const uint8_t *secret, int past);

static inline void add_stripe(uint64_t *sums, const uint64_t *words, const uint8_t *secret)
{
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t keyed = words[lane] ^ word_at(secret + 8 * lane);
        sums[lane ^ 1] += words[lane];
        sums[lane] += (keyed & UINT32_MAX) * (keyed >> 32);
    }
}

static inline void scramble(uint64_t *sums, const uint8_t *secret)
{
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t sum = sums[lane];
        sums[lane] = (sum ^ (sum >> 47) ^ word_at(secret + SECRET_BYTES - STRIPE + 8 * lane)) * PRIME32_1;
    }
}

static void plain_stripes(uint64_t *sums, const uint8_t *from, uint8_t *to, size_t count, size_t first, const uint8_t *secret, int past)
{
    (void)past;
    for (; count; count--, from += STRIPE, to += STRIPE) {
        uint64_t words[LANES]; /* what is stored is what is added, whoever writes the source meanwhile */
        memcpy(words, from, STRIPE);
        memcpy(to, words, STRIPE);
        add_stripe(sums, words, secret + 8 * first);
        if (++first == STRIPES_OF_BLOCK) {
            scramble(sums, secret);
            first = 0;
        }
    }
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f")))
#define INLINE static inline __attribute__((always_inline))

INLINE AVX2 __m256i half_added(__m256i sum, const uint8_t *from, uint8_t *to, const uint8_t *secret, int past)
{
    __m256i words = _mm256_loadu_si256((const __m256i *)from);
    if (past)
        _mm256_stream_si256((__m256i *)to, words);
    else
        _mm256_storeu_si256((__m256i *)to, words);
    __m256i keyed = _mm256_xor_si256(words, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(product, _mm256_add_epi64(sum, _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2))));
}

INLINE AVX2 __m256i half_scrambled(__m256i sum, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    sum = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
    sum = _mm256_xor_si256(sum, _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), high);
}

INLINE AVX2 void avx2_walk(uint64_t *sums, const uint8_t *from, uint8_t *to, size_t count, size_t first, const uint8_t *secret, int past)
{
    __m256i low = _mm256_loadu_si256((__m256i *)sums), high = _mm256_loadu_si256((__m256i *)sums + 1);
    while (count) {
        size_t last = first + count < STRIPES_OF_BLOCK ? first + count : STRIPES_OF_BLOCK;
        count -= last - first;
        for (; first < last; first++, from += STRIPE, to += STRIPE) {
            _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0);
            low = half_added(low, from, to, secret + 8 * first, past);
            high = half_added(high, from + 32, to + 32, secret + 8 * first + 32, past);
        }
        if (first == STRIPES_OF_BLOCK) {
            low = half_scrambled(low, secret + SECRET_BYTES - STRIPE);
            high = half_scrambled(high, secret + SECRET_BYTES - STRIPE + 32);
            first = 0;
        }
    }
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)sums + 1, high);
}

AVX2 static void avx2_stripes(uint64_t *sums, const uint8_t *from, uint8_t *to, size_t count, size_t first, const uint8_t *secret, int past)
{
    if (past)
        avx2_walk(sums, from, to, count, first, secret, 1);
    else
        avx2_walk(sums, from, to, count, first, secret, 0);
}

INLINE AVX512 __m512i added(__m512i sum, const uint8_t *from, uint8_t *to, const uint8_t *secret, int past)
{
    __m512i words = _mm512_loadu_si512(from);
    if (past)
        _mm512_stream_si512((void *)to, words);
    else
        _mm512_storeu_si512(to, words);
    __m512i keyed = _mm512_xor_si512(words, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    return _mm512_add_epi64(product, _mm512_add_epi64(sum, _mm512_shuffle_epi32(words, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2))));
}

INLINE AVX512 void avx512_walk(uint64_t *sums, const uint8_t *from, uint8_t *to, size_t count, size_t first, const uint8_t *secret, int past)
{
    const __m512i prime = _mm512_set1_epi64((long long)PRIME32_1);
    __m512i sum = _mm512_loadu_si512(sums);
    while (count) {
        size_t last = first + count < STRIPES_OF_BLOCK ? first + count : STRIPES_OF_BLOCK;
        count -= last - first;
        for (; first < last; first++, from += STRIPE, to += STRIPE) {
            _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0);
            sum = added(sum, from, to, secret + 8 * first, past);
        }
        if (first == STRIPES_OF_BLOCK) {
            sum = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
            sum = _mm512_xor_si512(sum, _mm512_loadu_si512(secret + SECRET_BYTES - STRIPE));
            __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime), 32);
            sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), high);
            first = 0;
        }
    }
    _mm512_storeu_si512(sums, sum);
}

AVX512 static void avx512_stripes(uint64_t *sums, const uint8_t *from, uint8_t *to, size_t count, size_t first, const uint8_t *secret, int past)
{
    if (past)
        avx512_walk(sums, from, to, count, first, secret, 1);
    else
        avx512_walk(sums, from, to, count, first, secret, 0);
}
#endif

/* -- levels ---- */

typedef struct {
    const char *name;
    Stripes stripes;
    uintptr_t alignment; /* of a target that is written past the caches; 0: never */
} Level;

static const Level LEVELS[] = {
    {"portable", plain_stripes, 0},
#if defined(__x86_64__)
    {"avx2", avx2_stripes, 32},
    {"avx512", avx512_stripes, 64},
#endif
};
#define LEVEL_COUNT ((int)(sizeof LEVELS / sizeof *LEVELS))
static const Level *level = LEVELS;

static int is_supported(int number)
{
#if defined(__x86_64__)
    return number == 0 || (number == 1 && __builtin_cpu_supports("avx2")) || (number == 2 && __builtin_cpu_supports("avx512f"));
#else
    return number == 0;
#endif
}

/* -- one block ---- */

typedef struct {
    uint8_t *to_base;
    const uint8_t *from_base;
    const int64_t *to, *from, *length;
    size_t run, at; /* where the next byte is */
} Walk;

/* Copy the next `count` bytes, which may be of several runs, and leave them in `seen`. */
static void copy_across(Walk *walk, uint8_t *seen, size_t count)
{
    while (count) {
        size_t left = (size_t)walk->length[walk->run] - walk->at, some = left < count ? left : count;
        memcpy(seen, walk->from_base + walk->from[walk->run] + walk->at, some);
        memcpy(walk->to_base + walk->to[walk->run] + walk->at, seen, some);
        seen += some, count -= some, walk->at += some;
        if (walk->at == (size_t)walk->length[walk->run])
            walk->run++, walk->at = 0;
    }
}

static uint64_t folded(uint64_t one, uint64_t other)
{
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Copy one block of `total` > SHORT_BYTES bytes, and return the digest of what was stored. */
static uint64_t copy_block(Walk *walk, size_t total, uint64_t seed)
{
    uint8_t secret[SECRET_BYTES] __attribute__((aligned(STRIPE))), seen[STRIPE] = {0}, last[STRIPE];
    uint64_t words[LANES], sums[LANES] __attribute__((aligned(STRIPE))) = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                                                           PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    for (int i = 0; i < SECRET_BYTES; i += 16) {
        uint64_t low = word_at(DEFAULT_SECRET + i) + seed, high = word_at(DEFAULT_SECRET + i + 8) - seed;
        memcpy(secret + i, &low, 8);
        memcpy(secret + i + 8, &high, 8);
    }
    size_t stripes = (total - 1) / STRIPE, done = 0;
    while (done < stripes) {
        const uint8_t *from = walk->from_base + walk->from[walk->run] + walk->at;
        uint8_t *to = walk->to_base + walk->to[walk->run] + walk->at;
        size_t left = (size_t)walk->length[walk->run] - walk->at, here = left / STRIPE;
        if (here > stripes - done)
            here = stripes - done;
        if (here) {
            int past = level->alignment && (uintptr_t)to % level->alignment == 0;
            level->stripes(sums, from, to, here, done % STRIPES_OF_BLOCK, secret, past);
            done += here, walk->at += here * STRIPE;
            if (done == stripes) /* what was stored: the source may be another one by now */
                memcpy(seen, to + (here - 1) * STRIPE, STRIPE);
        } else { /* a stripe of several runs */
            copy_across(walk, seen, STRIPE);
            memcpy(words, seen, STRIPE);
            add_stripe(sums, words, secret + 8 * (done % STRIPES_OF_BLOCK));
            if (++done % STRIPES_OF_BLOCK == 0)
                scramble(sums, secret);
        }
        if (walk->at == (size_t)walk->length[walk->run] && walk->at)
            walk->run++, walk->at = 0;
    }
    size_t rest = total - stripes * STRIPE; /* 1 to 64 bytes: the last 64 of the block are one more stripe */
    memcpy(last, seen + rest, STRIPE - rest);
    copy_across(walk, last + STRIPE - rest, rest);
    memcpy(words, last, STRIPE);
    add_stripe(sums, words, secret + SECRET_BYTES - STRIPE - 7);
    uint64_t digest = (uint64_t)total * PRIME64_1;
    for (int pair = 0; pair < LANES / 2; pair++)
        digest += folded(sums[2 * pair] ^ word_at(secret + 11 + 16 * pair), sums[2 * pair + 1] ^ word_at(secret + 19 + 16 * pair));
    digest ^= digest >> 37;
    digest *= PRIME_MX1;
    return digest ^ (digest >> 32);
}

/* -- memory that goes away ---- */

static __thread sigjmp_buf *way_out; /* of a copy that runs on this thread */
static __thread int is_passed_on;    /* since the last copy of this thread */
static struct sigaction before_us;

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    if (way_out)
        siglongjmp(*way_out, 1);
    /* Not of a copy: go on as without us. A handler that knows us as its own predecessor, as faulthandler may, ends with giving
     * the signal back. */
    int is_default = !(before_us.sa_flags & SA_SIGINFO) && (before_us.sa_handler == SIG_DFL || before_us.sa_handler == SIG_IGN);
    if (is_default || is_passed_on) {
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    is_passed_on = 1;
    sigaction(number, &before_us, NULL); /* until the next copy: it may be called again, or take itself away */
    if (before_us.sa_flags & SA_SIGINFO)
        before_us.sa_sigaction(number, info, context);
    else
        before_us.sa_handler(number);
}

static void watch(void)
{
    struct sigaction now, ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    is_passed_on = 0;
    if (sigaction(SIGBUS, NULL, &now) == 0 && !((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error)) {
        before_us = now;
        sigaction(SIGBUS, &ours, NULL);
    }
}

typedef struct {
    Walk walk;
    const int64_t *ends; /* NULL: no digests */
    const uint64_t *seeds;
    uint64_t *digests;
    size_t runs, blocks;
} Work;

static void copy_all(Work *work)
{
    Walk *walk = &work->walk;
    if (!work->ends) {
        for (size_t i = 0; i < work->runs; i++)
            memcpy(walk->to_base + walk->to[i], walk->from_base + walk->from[i], (size_t)walk->length[i]);
        return;
    }
    for (size_t block = 0, run = 0; block < work->blocks; block++) {
        size_t total = 0;
        walk->run = run, walk->at = 0;
        for (; run < (size_t)work->ends[block]; run++)
            total += (size_t)walk->length[run];
        work->digests[block] = copy_block(walk, total, work->seeds[block]);
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* 0 when all was copied; otherwise the memory is gone. */
static int copy_guarded(Work *work)
{
    sigjmp_buf buffer;
    watch();
    if (sigsetjmp(buffer, 1)) {
        way_out = NULL;
        return -1;
    }
    way_out = &buffer;
    copy_all(work);
    way_out = NULL;
    return 0;
}

/* -- headers ---- */

#define HEADER 64
#define CRC_AT 60 /* of the bytes before it */

static uint32_t crc_tables[4][256]; /* CRC-32 of zlib, four bytes at a time */

static void make_crc_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0xEDB88320U : crc >> 1;
        crc_tables[0][byte] = crc;
    }
    for (int further = 1; further < 4; further++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = crc_tables[further - 1][byte];
            crc_tables[further][byte] = crc >> 8 ^ crc_tables[0][crc & 255];
        }
}

static int has_its_crc(const uint8_t *header)
{
    uint32_t crc = UINT32_MAX, word;
    for (int at = 0; at < CRC_AT; at += 4) {
        memcpy(&word, header + at, sizeof word);
        word ^= crc;
        crc = crc_tables[3][word & 255] ^ crc_tables[2][word >> 8 & 255] ^ crc_tables[1][word >> 16 & 255] ^ crc_tables[0][word >> 24];
    }
    memcpy(&word, header + CRC_AT, sizeof word);
    return word == ~crc;
}

/* -- for Python ---- */

static const char *unsound(const Work *work, int has_digests)
{
    for (size_t i = 0; i < work->runs; i++)
        if (work->walk.length[i] < 0 || (has_digests && work->walk.length[i] == 0))
            return "lengths are not negative, and not zero where digests are wanted";
    if (!has_digests)
        return NULL;
    int64_t run = 0;
    for (size_t block = 0; block < work->blocks; block++) {
        uint64_t total = 0;
        if (work->ends[block] < run || (uint64_t)work->ends[block] > work->runs)
            return "ends of blocks grow up to the number of runs";
        for (; run < work->ends[block]; run++)
            total += (uint64_t)work->walk.length[run];
        if (total <= SHORT_BYTES)
            return "a block has more than 240 bytes";
    }
    return (size_t)run == work->runs ? NULL : "every run is of a block";
}

static PyObject *copied(Work *work, int has_digests)
{
    const char *wrong = unsound(work, has_digests);
    int gone = 0;
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    gone = copy_guarded(work);
    Py_END_ALLOW_THREADS
    if (gone) {
        errno = EFAULT;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *one_pass_copy(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long to_base, from_base;
    Py_buffer to, from, length;
    if (!PyArg_ParseTuple(args, "KKy*y*y*", &to_base, &from_base, &to, &from, &length))
        return NULL;
    PyObject *result = NULL;
    if (to.len == length.len && from.len == length.len && length.len % 8 == 0) {
        Work work = {.walk = {(uint8_t *)(uintptr_t)to_base, (const uint8_t *)(uintptr_t)from_base, to.buf, from.buf, length.buf, 0, 0},
                     .runs = (size_t)length.len / 8};
        result = copied(&work, 0);
    } else
        PyErr_SetString(PyExc_ValueError, "targets, sources and lengths are int64 arrays of one size");
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    PyBuffer_Release(&length);
    return result;
}

static PyObject *one_pass_copy_blocks(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long to_base, from_base;
    Py_buffer to, from, length, ends, seeds, digests;
    if (!PyArg_ParseTuple(args, "KKy*y*y*y*y*w*", &to_base, &from_base, &to, &from, &length, &ends, &seeds, &digests))
        return NULL;
    PyObject *result = NULL;
    if (to.len == length.len && from.len == length.len && length.len % 8 == 0 && ends.len == seeds.len && ends.len == digests.len &&
        ends.len % 8 == 0) {
        Work work = {.walk = {(uint8_t *)(uintptr_t)to_base, (const uint8_t *)(uintptr_t)from_base, to.buf, from.buf, length.buf, 0, 0},
                     .ends = ends.buf,
                     .seeds = seeds.buf,
                     .digests = digests.buf,
                     .runs = (size_t)length.len / 8,
                     .blocks = (size_t)ends.len / 8};
        result = copied(&work, 1);
    } else
        PyErr_SetString(PyExc_ValueError, "arrays of 64-bit numbers, one size for runs and one for blocks");
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    PyBuffer_Release(&length);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&seeds);
    PyBuffer_Release(&digests);
    return result;
}

static PyObject *one_pass_copy_one(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long seed;
    Py_buffer to, from;
    if (!PyArg_ParseTuple(args, "w*y*K", &to, &from, &seed))
        return NULL;
    PyObject *result = NULL;
    if (to.len == from.len) {
        int64_t zero = 0, length = to.len, end = 1;
        uint64_t own_seed = seed, digest = 0;
        Work work = {.walk = {to.buf, from.buf, &zero, &zero, &length, 0, 0},
                     .ends = &end,
                     .seeds = &own_seed,
                     .digests = &digest,
                     .runs = 1,
                     .blocks = 1};
        PyObject *none = copied(&work, 1);
        if (none) {
            Py_DECREF(none);
            result = PyLong_FromUnsignedLongLong(digest);
        }
    } else
        PyErr_SetString(PyExc_ValueError, "target and source have one length");
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    return result;
}

static PyObject *one_pass_have_crcs(PyObject *module, PyObject *headers)
{
    (void)module;
    Py_buffer found;
    if (PyObject_GetBuffer(headers, &found, PyBUF_SIMPLE))
        return NULL;
    int are_whole = 1, is_rest = found.len % HEADER != 0;
    for (Py_ssize_t at = 0; are_whole && !is_rest && at < found.len; at += HEADER)
        are_whole = has_its_crc((const uint8_t *)found.buf + at);
    PyBuffer_Release(&found);
    if (!is_rest)
        return PyBool_FromLong(are_whole);
    PyErr_SetString(PyExc_ValueError, "headers of 64 bytes each");
    return NULL;
}

static PyObject *one_pass_levels(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    PyObject *names = PyList_New(0);
    for (int number = 0; names && number < LEVEL_COUNT; number++) {
        if (!is_supported(number))
            continue;
        PyObject *name = PyUnicode_FromString(LEVELS[number].name);
        if (!name || PyList_Append(names, name))
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *one_pass_use(PyObject *module, PyObject *name)
{
    (void)module;
    for (int number = 0; number < LEVEL_COUNT; number++)
        if (is_supported(number) && PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, LEVELS[number].name) == 0) {
            level = &LEVELS[number];
            Py_RETURN_NONE;
        }
    PyErr_SetString(PyExc_ValueError, "this processor does not have that level");
    return NULL;
}

static PyMethodDef methods[] = {
    {"copy", one_pass_copy, METH_VARARGS, "copy(target_base, source_base, targets, sources, lengths)"},
    {"copy_blocks", one_pass_copy_blocks, METH_VARARGS,
     "copy_blocks(target_base, source_base, targets, sources, lengths, ends, seeds, digests)"},
    {"copy_one", one_pass_copy_one, METH_VARARGS, "copy_one(target, source, seed)"},
    {"have_crcs", one_pass_have_crcs, METH_O, "have_crcs(headers): whether each of these headers of 64 bytes has its checksum"},
    {"levels", one_pass_levels, METH_NOARGS, "levels(): what this processor can do, the fastest last"},
    {"use", one_pass_use, METH_O, "use(level): for all copies of this process from now on"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_one_pass", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__one_pass(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    make_crc_tables();
    for (int number = 0; number < LEVEL_COUNT; number++)
        if (is_supported(number))
            level = &LEVELS[number];
    return PyModule_Create(&definition);
}
