import numpy as np
from numpy.typing import NDArray

def find(
    body: memoryview,
    rows: int,
    mixer: int,
    keys: NDArray[np.uint64] | bytes,
    numbers: NDArray[np.uint32] | None,
    positions: NDArray[np.int64] | None,
    /,
) -> None: ...
def insert(
    body: memoryview,
    rows: int,
    mixer: int,
    keys: NDArray[np.uint64] | bytes,
    numbers: NDArray[np.uint32],
    done: NDArray[np.bool_],
    /,
) -> int: ...
