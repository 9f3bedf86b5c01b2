from numpy.typing import NDArray

def find(
    body: memoryview, rows: int, keys: object, numbers: NDArray[object] | None, positions: NDArray[object] | None
) -> None: ...
