from numpy import int64
from numpy.typing import NDArray

def copy(
    target_base: int, source_base: int, targets: NDArray[int64], sources: NDArray[int64], lengths: NDArray[int64]
) -> None: ...
