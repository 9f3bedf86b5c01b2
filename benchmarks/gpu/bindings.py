"""The constants and structs of `kvservice.copying.cuda.driver` against those of cuda-bindings, NVIDIA's own binding."""

from __future__ import annotations

import ctypes
from typing import Any

from kvservice.copying.cuda import driver as cuda_driver


def constants() -> dict[str, Any]:
    """The product's constants and structs against those of cuda-bindings, where it is installed."""
    from cuda.bindings import driver as theirs

    order, flag = theirs.CUmemcpySrcAccessOrder, theirs.CUpointer_attribute
    pairs = {
        "NOT_READY": (cuda_driver.NOT_READY, theirs.CUresult.CUDA_ERROR_NOT_READY),
        "LEGACY_IPC_CAPABLE": (
            cuda_driver._LEGACY_IPC_CAPABLE,
            flag.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        ),
        "LAZY_ENABLE_PEER_ACCESS": (
            cuda_driver._LAZY_ENABLE_PEER_ACCESS,
            theirs.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        ),
        "STREAM_NON_BLOCKING": (cuda_driver._STREAM_NON_BLOCKING, theirs.CUstream_flags.CU_STREAM_NON_BLOCKING),
        "EVENT_DISABLE_TIMING": (cuda_driver._EVENT_DISABLE_TIMING, theirs.CUevent_flags.CU_EVENT_DISABLE_TIMING),
        "HOST_REGISTER_PORTABLE": (cuda_driver._HOST_REGISTER_PORTABLE, theirs.CU_MEMHOSTREGISTER_PORTABLE),
        "ORDER_STREAM": (cuda_driver.ORDER_STREAM, order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM),
        "ORDER_ANY": (cuda_driver.ORDER_ANY, order.CU_MEMCPY_SRC_ACCESS_ORDER_ANY),
    }
    numbers = {name: (own, int(their)) for name, (own, their) in pairs.items()}
    for name, own, their in (
        ("bytes of the attributes", ctypes.sizeof(cuda_driver._Attributes), theirs.CUmemcpyAttributes),
        ("bytes of a memory handle", cuda_driver.IPC_HANDLE_BYTES, theirs.CUipcMemHandle),
        ("bytes of an event handle", cuda_driver.IPC_HANDLE_BYTES, theirs.CUipcEventHandle),
    ):
        numbers[name] = (own, int(theirs.sizeof(their)))
    known = {int(code) for code in theirs.CUresult}
    return {
        "checked": len(numbers),
        "wrong": {name: pair for name, pair in numbers.items() if pair[0] != pair[1]},
        "final errors that it does not know": sorted(cuda_driver.FATAL - known),
    }
