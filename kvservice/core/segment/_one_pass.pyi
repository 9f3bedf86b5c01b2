from numpy import int64, uint64
from numpy.typing import NDArray

def copy(
    target_base: int, source_base: int, targets: NDArray[int64], sources: NDArray[int64], lengths: NDArray[int64]
) -> None: ...
def copy_blocks(
    target_base: int,
    source_base: int,
    targets: NDArray[int64],
    sources: NDArray[int64],
    lengths: NDArray[int64],
    ends: NDArray[int64],
    seeds: NDArray[uint64],
    digests: NDArray[uint64],
) -> None: ...
def copy_one(target: memoryview, source: bytes | bytearray | memoryview, seed: int) -> int: ...
def have_crcs(headers: bytes) -> bool: ...
def levels() -> list[str]: ...
def use(level: str) -> None: ...
