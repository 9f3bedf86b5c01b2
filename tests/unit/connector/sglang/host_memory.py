"""Host memory as SGLang lays it out, on NumPy: pages of keys and values, with the addresses of their pieces."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from kvservice.api.layout import Array
from kvservice.api.pool_thread import PoolThread
from kvservice.connector.sglang.clears import ClearTerms
from kvservice.connector.sglang.options import SGLangOptions
from kvservice.connector.sglang.pages import Ranks
from kvservice.connector.sglang.storage import ALL_LAYERS, ALL_PAGES, KV, Identity, PageStorage, PageTransfer

LAYERS, PAGE, DIM = 3, 4, 8
PROMPT = list(range(100, 100 + 6 * PAGE))
OPTIONS: dict[str, object] = {
    "backend_name": "kvservice",
    "module_path": "kvservice.connector.sglang",
    "class_name": "HiCacheKVService",
    "interface_v1": 1,
    "mode": "embedded",
    "memory": "16MiB",
}


class HostMemory:
    """MHA in the layout page_first_direct: `[K|V][page][layer][token][head][dim]`, float32."""

    layout = "page_first_direct"
    dtype = "torch.float32"
    layer_num, page_size, head_dim = LAYERS, PAGE, DIM

    def __init__(self, pages: int = 16, heads: int = 4, seed: int = 0) -> None:
        self.head_num = heads
        shape = (2, pages, LAYERS, PAGE, heads, DIM)
        self.kv = np.random.default_rng(seed).standard_normal(shape, np.float32)

    def get_page_buffer_meta(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        size = self.kv[0, 0].nbytes
        base, v_offset = self.kv.ctypes.data, self.kv[0].nbytes
        numbers = [place // PAGE for place in list(indices)[::PAGE]]
        addresses = [base + number * size + part for number in numbers for part in (0, v_offset)]
        return addresses, [size] * len(addresses)

    def pages(self, numbers: Sequence[int]) -> Array:
        found: Array = self.kv[:, list(numbers)].copy()
        return found


class LatentMemory(HostMemory):
    """MLA: one piece a page, the same on every rank."""

    def __init__(self, pages: int = 16, seed: int = 0) -> None:
        super().__init__(pages, 1, seed)
        self.head_num = 0

    def get_page_buffer_meta(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        addresses, sizes = super().get_page_buffer_meta(indices)
        return addresses[::2], sizes[::2]


def places(numbers: Sequence[int]) -> list[int]:
    """The places of the tokens of these pages."""
    return [number * PAGE + token for number in numbers for token in range(PAGE)]


def page_hashes(tokens: Sequence[int], seed: str = "") -> list[str]:
    """SGLang's names of the whole pages of a prompt: a SHA-256 chain over little-endian u32."""
    digest, found = bytes.fromhex(seed), []
    for start in range(0, len(tokens) - len(tokens) % PAGE, PAGE):
        digest = hashlib.sha256(digest + struct.pack(f"<{PAGE}I", *tokens[start : start + PAGE])).digest()
        found.append(digest.hex())
    return found


def storage(
    memory: HostMemory,
    *,
    heads: int = 4,
    ranks: Ranks | None = None,
    thread: PoolThread | None = None,
    weights: str = "a",
    clears: ClearTerms | None = None,
    layers: str = ALL_LAYERS,
    **options: object,
) -> PageStorage:
    parsed = SGLangOptions.parse({**OPTIONS, **options})
    made = PageStorage(parsed, Identity("tiny", {"weights": weights}, heads, ranks or Ranks(), layers), thread, clears)
    made.register(KV, memory, places([0]))
    return made


def wanted(pages: Sequence[str], numbers: Sequence[int], pool: str = KV, policy: str = ALL_PAGES) -> PageTransfer:
    return PageTransfer(pool, pages, places(numbers), policy)
