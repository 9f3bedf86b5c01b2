"""Converting pages that engines of several kinds share: GB/s of one thread, engine's order to page and back.

    python -m benchmarks.pages [--total BYTES] [--rounds N] [--out PATH]

Each kind of engine's tensors hold `--total` bytes, and every page of them is copied to a slot and back by the copier of
the connector. `memcpy` copies as many bytes between two tensors. The best of the rounds counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.report import default_out, print_table, write_report
from kvservice.connector.worker.page_copier import PageCopier, column_views, row_views
from kvservice.core.block.pages import PAGE_TOKENS
from kvservice.core.segment.layout import SlotLayout
from kvservice.units import MiB, parse_bytes

# (name, layers, KV heads, head size): SmolLM2-135M, and models of 8 billion parameters
MODELS = (("135M", 30, 3, 64), ("8B", 32, 8, 128))
KINDS = {"vLLM on CPUs": (32, column_views), "rows of K and V": (16, row_views)}


def best(rounds: int, work: Callable[[], None], byte_count: int) -> float:
    """GB/s of the fastest round."""
    fastest = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - began)
    return round(byte_count / fastest / 1e9, 2)


def measure(kind: str, shape: tuple[int, int, int], dtype: torch.dtype, total: int, rounds: int) -> dict[str, float]:
    tokens, views = KINDS[kind]
    layers, heads, size = shape
    layout = SlotLayout(layers, heads, PAGE_TOKENS * 2 * size * dtype.itemsize, PAGE_TOKENS)
    parts = tokens // PAGE_TOKENS
    blocks = max(total // (layout.payload_bytes * parts), 1)
    tensors = list(torch.zeros(layers, blocks, heads, tokens, 2 * size, dtype=dtype).unbind(0))
    copier = PageCopier(tensors, views(tensors), range(heads))
    count = blocks * parts
    memory = bytearray(count * layout.payload_bytes)
    slots = copier.bind(memoryview(memory), layout)
    places = [(page // parts, page * layout.payload_bytes, page % parts) for page in range(count)]
    other, byte_count = torch.zeros_like(slots), count * layout.payload_bytes

    def store() -> None:
        for block, offset, part in places:
            copier.store(block, offset, part)

    def copied() -> None:
        other.copy_(slots)

    def load() -> None:
        for block, offset, part in places:
            copier.load(offset, block, part)

    return {
        "store_gb_per_second": best(rounds, store, byte_count),
        "load_gb_per_second": best(rounds, load, byte_count),
        "memcpy_gb_per_second": best(rounds, copied, byte_count),
        "page_bytes": layout.payload_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=parse_bytes, default=256 * MiB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=default_out("pages"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name, *shape in MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            for kind in KINDS:
                found = measure(kind, (shape[0], shape[1], shape[2]), dtype, arguments.total, arguments.rounds)
                rows.append({"model": name, "dtype": str(dtype).removeprefix("torch."), "engine": kind, **found})
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    print(f"wrote {write_report('pages', {'pages': rows}, arguments.out)}")


if __name__ == "__main__":
    main()
