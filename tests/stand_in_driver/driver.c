/* A stand-in for libcuda.so.1: the driver calls that kvservice makes, over host memory, for machines without a GPU.
 *
 * It is unkind on purpose. A stream is a queue that a thread works off later than the call. The processor cannot touch
 * device memory. The copies of a batch run in reverse. A source given as ORDER_ANY is read before the earlier work of its
 * stream. IPC handles work between processes only. A mistake that a GPU punishes gets the GPU's error and a line on
 * standard error, and is counted. There are no kernels but the two at the end, no graphs, no default stream and no time:
 * nothing can be measured here. Its GPUs, one or two, are no peers: a kernel reaches the memory of its own only.
 *
 * Faults on request: the settings below, as STAND_IN_<NAME> in the environment or by stand_in_set().
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define PAGE 4096ul
#define PAGES(bytes) (((bytes) + PAGE - 1) / PAGE * PAGE)

typedef uint64_t Pointer; /* CUdeviceptr; also of host memory, as CUDA has one address space */

enum { /* CUresult */
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAPPING_FAILED = 205,
    NO_PEERS = 217,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};

/* ---- settings and counters ---- */

enum { VERSION, DEVICES, DELAY_US, WITHOUT_IPC, PIN_FAILS_AT, UNPIN_MS, FAULTS_AT, HANGS_AT, SETTINGS };
static struct {
    const char *name;
    long value;
} settings[SETTINGS] = {
    [VERSION] = {"VERSION", 13000},        /* of the driver; below 12080 there is no batched copy */
    [DEVICES] = {"DEVICES", 1},            /* GPUs, 1 or 2 */
    [DELAY_US] = {"DELAY_US", 200},        /* before each piece of a stream's work */
    [WITHOUT_IPC] = {"WITHOUT_IPC", 0},    /* 1: allocations have no handle, as with expandable segments */
    [PIN_FAILS_AT] = {"PIN_FAILS_AT", 0},  /* the n-th registration of host memory fails */
    [UNPIN_MS] = {"UNPIN_MS", 0},          /* how long each unregistration takes */
    [FAULTS_AT] = {"FAULTS_AT", 0},        /* the n-th copy call makes the context unusable for good */
    [HANGS_AT] = {"HANGS_AT", 0},          /* work from the n-th copy call on never ends */
};
enum { PAGEABLE_COPIES, MISTAKES, BATCHES, COUNTERS };
static uint64_t counters[COUNTERS];

static long setting(int which) { return __atomic_load_n(&settings[which].value, __ATOMIC_RELAXED); }
static void count(int which) { __atomic_add_fetch(&counters[which], 1, __ATOMIC_RELAXED); }

API int stand_in_set(const char *name, long value) {
    for (int i = 0; i < SETTINGS; i++)
        if (!strcmp(settings[i].name, name)) {
            __atomic_store_n(&settings[i].value, value, __ATOMIC_RELAXED);
            return OK;
        }
    return INVALID_VALUE;
}
API uint64_t stand_in_count(int which) { return __atomic_load_n(&counters[which], __ATOMIC_RELAXED); }

static void read_environment(void) {
    char name[64];
    for (int i = 0; i < SETTINGS; i++) {
        snprintf(name, sizeof name, "STAND_IN_%s", settings[i].name);
        const char *text = getenv(name);
        if (text && *text) settings[i].value = atol(text);
    }
}

/* ---- errors and contexts ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything below, but of what says otherwise */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static pid_t owner;         /* the process that called cuInit */
static int fatal;           /* the error that made the context unusable; atomic */
static int contexts[2];     /* the addresses stand for the primary contexts of the GPUs */
static __thread void *bound; /* by this thread */

static int device_bound(void) { return bound == &contexts[1]; }

static int mistake(int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "stand-in driver[%d]: ", (int)getpid());
    vfprintf(stderr, format, arguments);
    fprintf(stderr, " (CUDA error %d)\n", error);
    va_end(arguments);
    count(MISTAKES);
    return error;
}

static int fatal_error(void) { return __atomic_load_n(&fatal, __ATOMIC_ACQUIRE); }

static int make_unusable(const char *why) {
    __atomic_store_n(&fatal, ILLEGAL_ADDRESS, __ATOMIC_RELEASE);
    return mistake(ILLEGAL_ADDRESS, "%s: the context is unusable from now on", why);
}

static int initialised(void) {
    if (!owner) return NOT_INITIALIZED;
    return owner == getpid() ? OK : mistake(NOT_INITIALIZED, "initialised before a fork, unusable in the child");
}

static int usable(void) {
    int error = initialised();
    if (error || (error = fatal_error())) return error;
    return bound ? OK : mistake(INVALID_CONTEXT, "this thread has bound no context");
}
#define REQUIRE(check)              \
    do {                            \
        int failure_ = (check);     \
        if (failure_) return failure_; \
    } while (0)

API int cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (owner) return initialised();
    owner = getpid();
    read_environment();
    return OK;
}
API int cuDriverGetVersion(int *version) {
    *version = (int)setting(VERSION);
    return OK;
}
API int cuDeviceGetCount(int *found) {
    REQUIRE(initialised());
    *found = (int)setting(DEVICES);
    return OK;
}
API int cuDeviceGet(int *device, int index) {
    REQUIRE(initialised());
    *device = index;
    return index < 0 || index >= setting(DEVICES) ? INVALID_DEVICE : OK;
}
API int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    REQUIRE(initialised());
    memcpy(uuid, "stand-in driver", 16);
    uuid[15] = (unsigned char)device;
    return device < 0 || device >= setting(DEVICES) ? INVALID_DEVICE : OK;
}
API int cuDevicePrimaryCtxRetain(void **found, int device) {
    REQUIRE(initialised());
    if (device < 0 || device >= setting(DEVICES)) return INVALID_DEVICE;
    *found = &contexts[device];
    return OK;
}
API int cuCtxSetCurrent(void *wanted) { /* works also when the context is unusable */
    REQUIRE(initialised());
    bound = wanted;
    return OK;
}
API int cuGetErrorString(int error, const char **text) {
    *text = error == INVALID_CONTEXT    ? "invalid device context"
            : error == MAPPING_FAILED   ? "mapping of buffer object failed"
            : error == INVALID_VALUE    ? "invalid argument"
            : error == OUT_OF_MEMORY    ? "out of memory"
            : error == ILLEGAL_ADDRESS  ? "an illegal memory access was encountered"
                                        : "another error";
    return OK;
}

/* ---- memory ---- */

typedef struct { /* the last page of an allocation, and all of an event: shared between processes, atomic */
    uint64_t serial, recorded, completed;
    uint32_t is_freed;
} Shared;

typedef struct Memory { /* device memory; `base` is what the process sees, `alias` where the bytes are */
    struct Memory *next;
    Pointer base;
    size_t size;
    char *alias;
    Shared *shared;
    int descriptor;
    int opened; /* how often an IPC handle was opened; 0 for own memory */
    int device;
} Memory;

typedef struct Pinned {
    struct Pinned *next;
    Pointer base;
    size_t size;
} Pinned;

static Memory *memories;
static Pinned *pinned;
static uint64_t serials;
static long pin_calls;

static void drain_all(void);

static int shared_file(size_t bytes) {
    int descriptor = memfd_create("stand-in", MFD_CLOEXEC);
    if (descriptor >= 0 && ftruncate(descriptor, (off_t)bytes)) {
        close(descriptor);
        return -1;
    }
    return descriptor;
}

static uint64_t new_serial(void) {
    return (uint64_t)getpid() << 32 | __atomic_add_fetch(&serials, 1, __ATOMIC_RELAXED);
}

static Memory *memory_at(Pointer pointer) {
    for (Memory *memory = memories; memory; memory = memory->next)
        if (pointer >= memory->base && pointer < memory->base + memory->size) return memory;
    return NULL;
}

static Memory *map_memory(int descriptor, size_t size, int opened) {
    size_t mapped = PAGES(size);
    void *alias = mmap(NULL, mapped + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    void *base = mmap(NULL, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    Memory *memory = calloc(1, sizeof *memory);
    if (alias == MAP_FAILED || base == MAP_FAILED || !memory) return NULL;
    Shared *shared = (Shared *)((char *)alias + mapped);
    *memory = (Memory){memories, (Pointer)(uintptr_t)base, size, alias, shared, descriptor, opened, device_bound()};
    return memories = memory;
}

static void unmap_memory(Memory *memory) {
    Memory **at = &memories;
    while (*at != memory) at = &(*at)->next;
    *at = memory->next;
    munmap(memory->alias, PAGES(memory->size) + PAGE);
    munmap((void *)(uintptr_t)memory->base, PAGES(memory->size));
    close(memory->descriptor);
    free(memory);
}

API int cuMemAlloc_v2(Pointer *pointer, size_t bytes) {
    REQUIRE(usable());
    if (!bytes) return INVALID_VALUE;
    int descriptor = shared_file(PAGES(bytes) + PAGE);
    if (descriptor < 0) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    Memory *memory = map_memory(descriptor, bytes, 0);
    if (memory) {
        memory->shared->serial = new_serial();
        memset(memory->alias, 0xA5, bytes < 64ul << 20 ? bytes : 64ul << 20); /* never right by luck */
        *pointer = memory->base;
    }
    pthread_mutex_unlock(&lock);
    return memory ? OK : OUT_OF_MEMORY;
}
API int cuMemFree_v2(Pointer pointer) {
    REQUIRE(usable());
    pthread_mutex_lock(&lock);
    drain_all();
    Memory *memory = memory_at(pointer);
    int is_own = memory && memory->base == pointer && !memory->opened;
    if (is_own) {
        memory->shared->is_freed = 1;
        unmap_memory(memory);
    }
    pthread_mutex_unlock(&lock);
    return is_own ? OK : mistake(INVALID_VALUE, "freed what is no allocation of this process");
}
API int cuMemGetAddressRange_v2(Pointer *base, size_t *size, Pointer pointer) {
    REQUIRE(usable());
    pthread_mutex_lock(&lock);
    Memory *memory = memory_at(pointer);
    if (memory) {
        *base = memory->base;
        *size = memory->size;
    }
    pthread_mutex_unlock(&lock);
    return memory ? OK : mistake(NOT_FOUND, "asked for the allocation of what is no device memory");
}
API int cuPointerGetAttribute(void *data, int attribute, Pointer pointer) {
    REQUIRE(usable());
    pthread_mutex_lock(&lock);
    Memory *memory = memory_at(pointer);
    int is_capable = memory && !memory->opened && !setting(WITHOUT_IPC);
    pthread_mutex_unlock(&lock);
    if (!memory) return mistake(INVALID_VALUE, "asked about what is no device memory");
    if (attribute != 10) return NOT_SUPPORTED; /* CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE */
    *(unsigned char *)data = (unsigned char)is_capable; /* a boolean: one byte is written */
    return OK;
}
API int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    REQUIRE(usable());
    Pointer base = (Pointer)(uintptr_t)address;
    if (!bytes || flags > 15) return mistake(INVALID_VALUE, "registered nothing");
    unsigned char *resident = malloc(bytes / PAGE + 2);
    int is_mapped = !mincore((void *)(uintptr_t)(base & ~(PAGE - 1)), bytes + (base & (PAGE - 1)), resident);
    free(resident);
    if (!is_mapped) return mistake(INVALID_VALUE, "registered memory that is not mapped");
    pthread_mutex_lock(&lock);
    int fails = ++pin_calls == setting(PIN_FAILS_AT), overlaps = 0;
    for (Pinned *one = pinned; one; one = one->next) overlaps |= base < one->base + PAGES(one->size) && one->base < base + bytes;
    if (!fails && !overlaps) {
        Pinned *one = malloc(sizeof *one);
        *one = (Pinned){pinned, base, bytes};
        pinned = one;
    }
    pthread_mutex_unlock(&lock);
    if (fails) return mistake(OUT_OF_MEMORY, "told to refuse this registration");
    return overlaps ? mistake(ALREADY_REGISTERED, "registered the same memory twice") : OK;
}
API int cuMemHostUnregister(void *address) {
    REQUIRE(usable());
    usleep((useconds_t)(1000 * setting(UNPIN_MS)));
    pthread_mutex_lock(&lock);
    drain_all();
    Pinned **at = &pinned, *one;
    while ((one = *at) && one->base != (Pointer)(uintptr_t)address) at = &one->next;
    if (one) {
        *at = one->next;
        free(one);
    }
    pthread_mutex_unlock(&lock);
    return one ? OK : mistake(NOT_REGISTERED, "unregistered what was not registered");
}

/* ---- streams: queues of work, each worked off by a thread ---- */

enum { COPY, FILL, RECORD, WAIT };
typedef struct Work {
    struct Work *next;
    int kind, value;
    unsigned delay_us;
    size_t count;
    char **targets, **sources, **read_early; /* read_early[i]: bytes of the source as they were at the call, or NULL */
    size_t *sizes;
    Shared *event;
    uint64_t ticket; /* RECORD: how far the event is when this work has ended; WAIT: how far it must be */
} Work;

typedef struct Stream { /* never freed: small, and a handle that was destroyed stays recognisable */
    struct Stream *next;
    pthread_cond_t wake;
    Work *first, **last;
    uint64_t given, done;
    int is_destroyed, device;
} Stream;

static Stream *streams;

static Stream *stream_of(void *handle) {
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream == handle && !stream->is_destroyed) return stream;
    return NULL;
}

static void sleep_us(unsigned us) {
    struct timespec span = {us / 1000000, (long)(us % 1000000) * 1000};
    if (us) nanosleep(&span, NULL);
}

static void perform(const Work *work) { /* without the lock */
    sleep_us(work->delay_us);
    while (work->kind == WAIT && __atomic_load_n(&work->event->completed, __ATOMIC_ACQUIRE) < work->ticket && !fatal_error())
        sleep_us(20);
    if (fatal_error()) return;
    if (work->kind == COPY) /* a batch has no order: not the one in which it was given */
        for (size_t i = work->count; i-- > 0;)
            memmove(work->targets[i], work->read_early[i] ? work->read_early[i] : work->sources[i], work->sizes[i]);
    if (work->kind == FILL) memset(work->targets[0], work->value, work->sizes[0]);
    if (work->kind == RECORD && __atomic_load_n(&work->event->completed, __ATOMIC_RELAXED) < work->ticket)
        __atomic_store_n(&work->event->completed, work->ticket, __ATOMIC_RELEASE);
}

static Work *new_work(int kind, size_t count) {
    Work *work = calloc(1, sizeof *work);
    work->kind = kind;
    work->count = count;
    work->targets = calloc(count + 1, sizeof *work->targets);
    work->sources = calloc(count + 1, sizeof *work->sources);
    work->read_early = calloc(count + 1, sizeof *work->read_early);
    work->sizes = calloc(count + 1, sizeof *work->sizes);
    return work;
}

static void free_work(Work *work) {
    for (size_t i = 0; i < work->count; i++) free(work->read_early[i]);
    free(work->read_early);
    free(work->targets);
    free(work->sources);
    free(work->sizes);
    free(work);
}

static void *work_off(void *given) {
    Stream *stream = given;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && !stream->is_destroyed) pthread_cond_wait(&stream->wake, &lock);
        Work *work = stream->first;
        if (!work) break;
        stream->first = work->next;
        if (!stream->first) stream->last = &stream->first;
        pthread_mutex_unlock(&lock);
        perform(work);
        free_work(work);
        pthread_mutex_lock(&lock);
        stream->done++;
        pthread_cond_broadcast(&progress);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void give(Stream *stream, Work *work) {
    work->delay_us += (unsigned)setting(DELAY_US);
    *stream->last = work;
    stream->last = &work->next;
    stream->given++;
    pthread_cond_signal(&stream->wake);
}

static void drain(Stream *stream) {
    for (uint64_t until = stream->given; stream->done < until;) pthread_cond_wait(&progress, &lock);
}
static void drain_all(void) {
    for (Stream *stream = streams; stream; stream = stream->next) drain(stream);
}

API int cuStreamCreate(void **handle, unsigned flags) {
    REQUIRE(usable());
    if (flags > 1) return mistake(INVALID_VALUE, "a stream with flags %u", flags);
    Stream *stream = calloc(1, sizeof *stream);
    stream->last = &stream->first;
    stream->device = device_bound();
    pthread_cond_init(&stream->wake, NULL);
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    pthread_t thread;
    pthread_create(&thread, NULL, work_off, stream);
    pthread_detach(thread);
    *handle = stream;
    return OK;
}
API int cuStreamDestroy_v2(void *handle) { /* at once: what was given still ends */
    REQUIRE(usable());
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream) {
        stream->is_destroyed = 1;
        pthread_cond_signal(&stream->wake);
    }
    pthread_mutex_unlock(&lock);
    return stream ? OK : mistake(INVALID_HANDLE, "destroyed what is no stream");
}
API int cuStreamSynchronize(void *handle) {
    REQUIRE(usable());
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream) drain(stream);
    pthread_mutex_unlock(&lock);
    return stream ? fatal_error() : mistake(INVALID_HANDLE, "waited for what is no stream");
}

/* ---- events ---- */

enum { IS_EVENT = 0x45564e54, DISABLE_TIMING = 2, INTERPROCESS = 4 };
typedef struct { /* never freed: work of streams may still point to its page */
    int magic, is_imported, descriptor, device;
    unsigned flags;
    Shared *shared;
} Event;

static int check_event(const Event *event) {
    if (!event || event->magic != IS_EVENT) return mistake(INVALID_HANDLE, "used what is no event, or is destroyed");
    if (event->is_imported && event->shared->is_freed) return mistake(INVALID_HANDLE, "used an event that its owner destroyed");
    return OK;
}

static Event *new_event(int descriptor, unsigned flags, int is_imported) {
    void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (page == MAP_FAILED) return NULL;
    Event *event = malloc(sizeof *event);
    *event = (Event){IS_EVENT, is_imported, descriptor, device_bound(), flags, page};
    return event;
}

API int cuEventCreate(void **handle, unsigned flags) {
    REQUIRE(usable());
    if ((flags & INTERPROCESS) && !(flags & DISABLE_TIMING)) return mistake(INVALID_VALUE, "an event of two processes must not time");
    Event *event = new_event(shared_file(PAGE), flags, 0);
    if (!event) return OUT_OF_MEMORY;
    event->shared->serial = new_serial();
    *handle = event;
    return OK;
}
API int cuEventDestroy_v2(void *handle) {
    REQUIRE(usable());
    Event *event = handle;
    REQUIRE(check_event(event));
    if (!event->is_imported) event->shared->is_freed = 1;
    close(event->descriptor);
    event->magic = 0;
    return OK;
}
API int cuEventRecord(void *handle, void *where) {
    REQUIRE(usable());
    Event *event = handle;
    REQUIRE(check_event(event));
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(where);
    if (stream && stream->device != event->device) stream = NULL;
    if (stream) {
        Work *work = new_work(RECORD, 0);
        work->event = event->shared;
        work->ticket = __atomic_add_fetch(&event->shared->recorded, 1, __ATOMIC_ACQ_REL);
        give(stream, work);
    }
    pthread_mutex_unlock(&lock);
    return stream ? OK : mistake(INVALID_HANDLE, "recorded an event on what is no stream of its GPU");
}
API int cuStreamWaitEvent(void *where, void *handle, unsigned flags) { /* also of another GPU */
    REQUIRE(usable());
    const Event *event = handle;
    REQUIRE(check_event(event));
    if (flags) return mistake(INVALID_VALUE, "waited for an event with flags %u", flags);
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(where);
    if (stream) {
        Work *work = new_work(WAIT, 0);
        work->event = event->shared;
        work->ticket = __atomic_load_n(&event->shared->recorded, __ATOMIC_ACQUIRE);
        give(stream, work);
    }
    pthread_mutex_unlock(&lock);
    return stream ? OK : mistake(INVALID_HANDLE, "let what is no stream wait");
}
API int cuEventQuery(void *handle) {
    REQUIRE(usable());
    const Event *event = handle;
    REQUIRE(check_event(event));
    uint64_t recorded = __atomic_load_n(&event->shared->recorded, __ATOMIC_ACQUIRE);
    return __atomic_load_n(&event->shared->completed, __ATOMIC_ACQUIRE) >= recorded ? OK : NOT_READY;
}

/* ---- IPC: a handle names a descriptor of the exporter, which the importer opens through /proc ---- */

enum { MEMORY_HANDLE = 0x4d454d31, EVENT_HANDLE };
typedef struct {
    uint32_t kind, process;
    int32_t descriptor, device;
    uint64_t serial, size;
    char unused[32];
} Handle;
_Static_assert(sizeof(Handle) == 64, "CU_IPC_HANDLE_SIZE");

static int open_theirs(const Handle *handle, size_t bytes) {
    char path[64];
    struct stat facts;
    snprintf(path, sizeof path, "/proc/%u/fd/%d", handle->process, handle->descriptor);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor >= 0 && (fstat(descriptor, &facts) || (size_t)facts.st_size < bytes)) {
        close(descriptor);
        return -1;
    }
    return descriptor;
}

static int check_handle(const Handle *handle, uint32_t kind) {
    if (handle->kind != kind) return mistake(INVALID_VALUE, "an IPC handle of another kind");
    if (handle->process == (uint32_t)getpid()) return mistake(INVALID_CONTEXT, "a process cannot open its own IPC handle");
    return OK;
}

API int cuIpcGetMemHandle(Handle *handle, Pointer pointer) {
    REQUIRE(usable());
    pthread_mutex_lock(&lock);
    Memory *memory = memory_at(pointer);
    int has_one = memory && memory->base == pointer && !memory->opened && !setting(WITHOUT_IPC);
    if (has_one)
        *handle = (Handle){MEMORY_HANDLE, (uint32_t)getpid(), memory->descriptor, memory->device, memory->shared->serial, memory->size, ""};
    pthread_mutex_unlock(&lock);
    return has_one ? OK : mistake(INVALID_VALUE, "an IPC handle of what is not the start of an own allocation that has one");
}
API int cuIpcOpenMemHandle_v2(Pointer *pointer, Handle handle, unsigned flags) {
    REQUIRE(usable());
    REQUIRE(check_handle(&handle, MEMORY_HANDLE));
    if (flags != 1) return mistake(INVALID_VALUE, "IPC memory opened without lazy peer access");
    if (handle.device != device_bound()) return mistake(NO_PEERS, "opened memory of a GPU that is no peer");
    pthread_mutex_lock(&lock);
    Memory *memory = memories;
    while (memory && !(memory->opened && memory->shared->serial == handle.serial)) memory = memory->next;
    if (memory) {
        memory->opened++; /* the same pointer again, to be closed once more */
    } else {
        int descriptor = open_theirs(&handle, PAGES(handle.size) + PAGE);
        memory = descriptor < 0 ? NULL : map_memory(descriptor, handle.size, 1);
        if (memory && (memory->shared->serial != handle.serial || memory->shared->is_freed)) {
            unmap_memory(memory);
            memory = NULL;
        }
    }
    if (memory) *pointer = memory->base;
    pthread_mutex_unlock(&lock);
    return memory ? OK : mistake(MAPPING_FAILED, "the exporter of this memory is gone or has freed it");
}
API int cuIpcCloseMemHandle(Pointer pointer) {
    REQUIRE(usable());
    pthread_mutex_lock(&lock);
    drain_all();
    Memory *memory = memory_at(pointer);
    int is_open = memory && memory->base == pointer && memory->opened;
    if (is_open && !--memory->opened) unmap_memory(memory);
    pthread_mutex_unlock(&lock);
    return is_open ? OK : mistake(INVALID_VALUE, "closed memory that is not open");
}
API int cuIpcGetEventHandle(Handle *handle, void *given) {
    REQUIRE(usable());
    Event *event = given;
    REQUIRE(check_event(event));
    if (!(event->flags & INTERPROCESS) || event->is_imported) return mistake(INVALID_HANDLE, "an IPC handle of an event that has none");
    *handle = (Handle){EVENT_HANDLE, (uint32_t)getpid(), event->descriptor, event->device, event->shared->serial, PAGE, ""};
    return OK;
}
API int cuIpcOpenEventHandle(void **given, Handle handle) {
    REQUIRE(usable());
    REQUIRE(check_handle(&handle, EVENT_HANDLE));
    int descriptor = open_theirs(&handle, PAGE);
    Event *event = descriptor < 0 ? NULL : new_event(descriptor, DISABLE_TIMING | INTERPROCESS, 1);
    if (!event || event->shared->serial != handle.serial || event->shared->is_freed)
        return mistake(MAPPING_FAILED, "the owner of this event is gone");
    *given = event;
    return OK;
}

/* ---- copies ---- */

enum { PAGEABLE, REGISTERED, DEVICE };
enum { ORDER_STREAM = 1, ORDER_DURING_CALL, ORDER_ANY };
typedef struct {
    unsigned order;
    struct {
        unsigned type;
        int id;
    } source, target;
    unsigned flags;
} Attributes;
_Static_assert(sizeof(Attributes) == 24, "CUmemcpyAttributes of CUDA 12.8 and later");

static long copy_calls;

/* What memory these bytes are in, and where the bytes are. An error when they reach over an end. */
static int place_of(Pointer pointer, size_t bytes, int *place, char **at) {
    Memory *memory = memory_at(pointer);
    if (memory) {
        if (pointer + bytes > memory->base + memory->size) return mistake(INVALID_VALUE, "a copy reaches beyond its allocation");
        if (memory->shared->is_freed) return mistake(ILLEGAL_ADDRESS, "a copy of memory that its exporter has freed");
        *place = DEVICE;
        *at = memory->alias + (pointer - memory->base);
        return OK;
    }
    *place = PAGEABLE;
    *at = (char *)(uintptr_t)pointer;
    for (Pinned *one = pinned; one; one = one->next) {
        if (pointer + bytes <= one->base || pointer >= one->base + one->size) continue;
        if (pointer < one->base || pointer + bytes > one->base + one->size)
            return mistake(INVALID_VALUE, "a copy reaches over the end of registered memory");
        *place = REGISTERED;
    }
    return OK;
}

static int submit_copies(const Pointer *to, const Pointer *from, const size_t *sizes, size_t count_, unsigned order,
                         Stream *stream, size_t *failed) {
    Work *work = new_work(COPY, count_);
    int must_wait = 0, is_pageable = 0;
    for (size_t i = 0; i < count_; i++) {
        int source, target, error = place_of(to[i], sizes[i], &target, &work->targets[i]);
        if (!error) error = place_of(from[i], sizes[i], &source, &work->sources[i]);
        if (error) {
            *failed = i;
            free_work(work);
            return error;
        }
        work->sizes[i] = sizes[i];
        if (source == PAGEABLE || order != ORDER_STREAM) { /* staged by the call, or without regard to the stream */
            work->read_early[i] = malloc(sizes[i]);
            memcpy(work->read_early[i], work->sources[i], sizes[i]);
        }
        is_pageable |= source == PAGEABLE || target == PAGEABLE;
        must_wait |= target == PAGEABLE;
    }
    if (is_pageable) count(PAGEABLE_COPIES);
    long call = ++copy_calls;
    if (setting(FAULTS_AT) && call == setting(FAULTS_AT)) make_unusable("told to fault");
    if (setting(HANGS_AT) && call >= setting(HANGS_AT)) work->delay_us = 1000000000u;
    give(stream, work);
    if (must_wait) drain(stream);
    return fatal_error();
}

API int cuMemcpyAsync(Pointer to, Pointer from, size_t bytes, void *handle) {
    REQUIRE(usable());
    size_t failed;
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    int error = stream ? submit_copies(&to, &from, &bytes, 1, ORDER_STREAM, stream, &failed)
                       : mistake(INVALID_HANDLE, "a copy on what is no stream");
    pthread_mutex_unlock(&lock);
    return error;
}

/* With the arguments of CUDA 12.8. One set of attributes for all copies, as the product gives. */
API int cuMemcpyBatchAsync(const Pointer *to, const Pointer *from, const size_t *sizes, size_t count_,
                           const Attributes *attributes, const size_t *first, size_t attribute_count, size_t *failed,
                           void *handle) {
    REQUIRE(usable());
    *failed = SIZE_MAX;
    if (!count_ || attribute_count != 1 || *first) return mistake(INVALID_VALUE, "a batch without copies, or with several attributes");
    if (attributes->order < ORDER_STREAM || attributes->order > ORDER_ANY || attributes->flags > 1 ||
        attributes->source.type > 6 || attributes->target.type > 6)
        return mistake(INVALID_VALUE, "attributes of a batch that cannot be: is the struct's layout right?");
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    int error = stream ? submit_copies(to, from, sizes, count_, attributes->order, stream, failed)
                       : mistake(INVALID_HANDLE, "a batch on what is no stream");
    pthread_mutex_unlock(&lock);
    count(BATCHES);
    return error;
}

/* CUDA 13's own signature has no `failed`: whoever asks with that version does not get the function above. */
API int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)flags;
    int is_batch = !strcmp(name, "cuMemcpyBatchAsync");
    *function = is_batch && version >= 12080 && version < 13000 && setting(VERSION) >= version ? (void *)cuMemcpyBatchAsync : NULL;
    *status = *function ? 0 : is_batch ? 2 : 1;
    return OK;
}

API int cuMemcpy(Pointer to, Pointer from, size_t bytes) { /* synchronous */
    REQUIRE(usable());
    int place;
    char *target, *source;
    pthread_mutex_lock(&lock);
    drain_all();
    int error = place_of(to, bytes, &place, &target);
    if (!error) error = place_of(from, bytes, &place, &source);
    if (!error) memmove(target, source, bytes);
    pthread_mutex_unlock(&lock);
    return error;
}

/* ---- kernels that tests launch ---- */

/* Runs for so long, and writes `value` into these bytes at its end. */
API int stand_in_kernel(Pointer pointer, size_t bytes, int value, unsigned us, void *handle) {
    REQUIRE(usable());
    int place;
    Work *work = new_work(FILL, 1);
    work->value = value;
    work->delay_us = us;
    work->sizes[0] = bytes;
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    int error = stream ? place_of(pointer, bytes, &place, &work->targets[0]) : INVALID_HANDLE;
    if (error)
        free_work(work);
    else
        give(stream, work);
    pthread_mutex_unlock(&lock);
    return error;
}

/* The gather kernel. One wrong address makes the context unusable, as on a GPU. */
API int stand_in_gather(const Pointer *to, const Pointer *from, const size_t *sizes, size_t count_, void *handle) {
    REQUIRE(usable());
    size_t failed;
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    int error = stream ? OK : INVALID_HANDLE;
    for (size_t i = 0; !error && i < count_; i++) {
        const Memory *target = memory_at(to[i]), *source = memory_at(from[i]);
        if (!target || !source || target->device != stream->device || source->device != stream->device ||
            (to[i] | from[i] | sizes[i]) % 4)
            error = make_unusable("a kernel touched what is not memory of its GPU, or not in words");
    }
    if (!error) error = submit_copies(to, from, sizes, count_, ORDER_STREAM, stream, &failed);
    pthread_mutex_unlock(&lock);
    return error;
}
