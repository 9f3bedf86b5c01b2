"""The few calls of the CUDA driver that copies need, through ctypes: no toolkit, no torch.

The driver library is loaded on first use, so everything imports on machines without one. A thread binds the context
before its first call (`bind`). Every handle is a plain integer.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from typing import Any

from kvservice.errors import TransferError, Unavailable, UnsupportedLayout

LIBRARY = "libcuda.so.1"
IPC_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE, fixed by the driver

NOT_READY = 600  # CUDA_ERROR_NOT_READY
MAP_FAILED = 205  # CUDA_ERROR_MAP_FAILED
# Errors after which no call of this process succeeds: the context, or the whole driver, is unusable until the process
# ends.
FATAL = frozenset(
    {4}  # deinitialized
    | {214, 220, 226}  # uncorrectable memory or NVLink error, contained error
    | {700, 702, 709, 710}  # illegal address, launch timeout, context destroyed, assertion
    | {714, 715, 716, 717, 718, 719, 721}  # faults of a kernel
)
_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_EVENT_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_HOST_REGISTER_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
# cuMemcpyBatchAsync came with CUDA 12.8; asking for this version gives it with the signature it had then
_BATCH_VERSION = 12_080
ORDER_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the source may be written by earlier work of the stream
ORDER_ANY = 3  # the source does not change until the copy has ended


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle, which are passed by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * IPC_HANDLE_BYTES)]

    @classmethod
    def of(cls, data: bytes) -> IpcHandle:
        return cls.from_buffer_copy(data)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("source_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


class Driver:
    """The driver, bound to one device's primary context, which torch uses too. Calls raise TransferError unless they
    say otherwise."""

    def __init__(self, library: Any, index: int) -> None:
        self._library = library
        self._device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(index))
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.uuid = _uuid_of(library, self._device)
        self._batch = _batch_copy(library)
        self.fatal = ""  # the error that made this process's context unusable, in the driver's words

    @classmethod
    def of_device(cls, name: str) -> Driver:
        """The driver for the GPU with this UUID, or this index among those that the process sees. Raises
        Unavailable."""
        library = load()
        found = visible()
        if name.isdecimal() and int(name) < len(found):
            return cls(library, int(name))
        if name in found:
            return cls(library, found.index(name))
        raise Unavailable(f"there is no GPU {name} here; this process sees {', '.join(found) or 'none'}")

    @property
    def has_batch_copy(self) -> bool:
        return self._batch is not None

    def bind(self) -> None:
        """Make this thread use the device's context from now on."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises TransferError with the driver's words."""
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, result: int, where: str = "") -> None:
        """Raise TransferError for an error. Remembers an error after which no call succeeds any more."""
        try:
            _check(self._library, name, result, where=where)
        except TransferError as error:
            if result in FATAL and not self.fatal:
                self.fatal = error.message
            raise

    # -- memory ----

    def allocation_of(self, pointer: int) -> tuple[int, int]:
        """(base address, size in bytes) of the allocation that contains the pointer."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
        return base.value, size.value

    def export(self, pointer: int) -> tuple[bytes, int]:
        """(handle of the allocation, offset of the pointer in it). Raises UnsupportedLayout for memory that cannot have
        a handle."""
        capable = ctypes.c_uint(0)
        self.call(
            "cuPointerGetAttribute", ctypes.byref(capable), ctypes.c_int(_LEGACY_IPC_CAPABLE), ctypes.c_uint64(pointer)
        )
        if not capable.value:
            raise UnsupportedLayout(
                "the KV cache lies in virtual-memory-managed GPU memory, which has no IPC handle; start the engine "
                "without expandable_segments:True in PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF and without sleep "
                "mode, or set copier to in_process"
            )
        base, _ = self.allocation_of(pointer)
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle.bytes), pointer - base

    def open(self, handle: bytes) -> int:
        """Open another process's allocation. Returns its base address here. Close it once for each open."""
        pointer = ctypes.c_uint64()
        self.call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            IpcHandle.of(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        return pointer.value

    def close(self, pointer: int) -> None:
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def pin(self, address: int, byte_count: int) -> None:
        self.call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(byte_count),
            ctypes.c_uint(_HOST_REGISTER_PORTABLE),
        )

    def unpin(self, address: int) -> None:
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def allocate(self, byte_count: int) -> int:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(byte_count))
        return pointer.value

    def free(self, pointer: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(pointer))

    # -- streams and events ----

    def stream(self) -> int:
        """A stream that waits for no other stream, with the default priority.

        There is no lower priority, and priorities do not count between processes: the GPU divides its time between
        processes whatever they are. Copies by copy engines run beside another process's kernels; a kernel takes turns
        with them.
        """
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_STREAM_NON_BLOCKING))
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def event(self) -> int:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_EVENT_DISABLE_TIMING))
        return event.value or 0

    def open_event(self, handle: bytes) -> int:
        """The event of another process. Raises TransferError, also if that process has another /dev/shm, through which
        the driver shares events."""
        event = ctypes.c_void_p()
        result = self._library.cuIpcOpenEventHandle(ctypes.byref(event), IpcHandle.of(handle))
        where = "; do both processes have the same /dev/shm?" if result == MAP_FAILED else ""
        self._check("cuIpcOpenEventHandle", result, where)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self.call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def has_passed(self, event: int) -> bool:
        """Whether the work before the event has ended. Does not block. Raises TransferError if that work failed."""
        result = self._library.cuEventQuery(ctypes.c_void_p(event))
        if result == NOT_READY:
            return False
        self._check("cuEventQuery", result)
        return True

    # -- copies ----

    def copy(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Copy between any two memories. With pageable host memory the calling thread may block until the copy has
        ended."""
        self.call(
            "cuMemcpyAsync",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(byte_count),
            ctypes.c_void_p(stream),
        )

    def copy_batch(self, targets: Any, sources: Any, lengths: Any, order: int, stream: int) -> None:
        """Start many copies between pinned host memory and the device with one call; they have no order among
        themselves.

        Args:
            targets, sources, lengths: contiguous numpy arrays `(copies,)` uint64; addresses, and bytes.
        """
        assert self._batch is not None
        attributes, first, failed = _Attributes(source_order=order), ctypes.c_size_t(0), ctypes.c_size_t(0)
        result = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            lengths.ctypes.data,
            len(lengths),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        where, index = "", failed.value
        if result and index < len(lengths):
            where = f", copy {index}: {lengths[index]} bytes from {sources[index]:#x} to {targets[index]:#x}"
        self._check("cuMemcpyBatchAsync", result, where)


@functools.cache
def load() -> Any:
    """The driver library. Raises Unavailable if there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise Unavailable(f"there is no CUDA driver here: {error}") from error
    _check(library, "cuInit", library.cuInit(ctypes.c_uint(0)), Unavailable)
    return library


def visible() -> list[str]:
    """UUIDs of the GPUs that this process sees, in the driver's order. Raises Unavailable if there is no driver."""
    library = load()
    count = ctypes.c_int()
    _check(library, "cuDeviceGetCount", library.cuDeviceGetCount(ctypes.byref(count)), Unavailable)
    found = []
    for index in range(count.value):
        device = ctypes.c_int()
        _check(library, "cuDeviceGet", library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)), Unavailable)
        found.append(_uuid_of(library, device))
    return found


def is_present() -> bool:
    """Whether this process can use a GPU."""
    try:
        return bool(visible())
    except Unavailable:
        return False


def _uuid_of(library: Any, device: ctypes.c_int) -> str:
    raw = (ctypes.c_ubyte * 16)()
    get = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid
    _check(library, "cuDeviceGetUuid", get(ctypes.byref(raw), device), Unavailable)
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


def _batch_copy(library: Any) -> Any:
    """cuMemcpyBatchAsync with the arguments that it had in CUDA 12.8. None if the driver is older."""
    address_of = getattr(library, "cuGetProcAddress_v2", None)  # came with CUDA 12.0
    if address_of is None:
        return None
    pointer, status = ctypes.c_void_p(), ctypes.c_int()
    result = address_of(
        b"cuMemcpyBatchAsync",
        ctypes.byref(pointer),
        ctypes.c_int(_BATCH_VERSION),
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if result != 0 or not pointer.value:
        return None
    word, size = ctypes.c_void_p, ctypes.c_size_t
    return ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, size, word, word, size, word, word)(pointer.value)


def _check(
    library: Any, name: str, result: int, error: type[Unavailable | TransferError] = TransferError, where: str = ""
) -> None:
    if result == 0:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorString(ctypes.c_int(result), ctypes.byref(text))
    words = (text.value or b"unknown error").decode(errors="replace")
    raise error(f"{name}: {words} (CUDA error {result}){where}")
