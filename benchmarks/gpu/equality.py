"""Stage equality: a transformer generates the same tokens if its KV cache went through a worker and the pool.

Without vLLM, which such a machine may not have. The cache of a Llama with random weights is laid out in blocks as vLLM
lays it out, stored by a real copy worker, wiped, loaded into other blocks and used again. `--cpu` does the same on host
memory, with the worker for CPU engines.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Stage
from benchmarks.gpu_copies import through, worker_link
from kvservice.connector.worker.shared_kv import region_layout
from kvservice.copying.device import HOST
from kvservice.copying.engine.link import KVOffer
from kvservice.copying.memory import SharedMemory
from kvservice.copying.message import NO_EVENT, CopyRow, Direction, MemoryKind
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import plan_geometry, slot_index
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.layout import SlotLayout
from kvservice.memory.segment import Segment
from kvservice.units import BlockKey, Generation, MiB, SpanRoute

STAGE = Stage("equality")
CPU = "--cpu" in sys.argv  # to try the stage, so it computes little
LAYERS, HEADS, WIDTH, TOKENS = 2 if CPU else 8, 4, 64, 16  # WIDTH: of K, and of V
PROMPT, NEW, WORDS = 64 if CPU else 512, 8 if CPU else 48, 256 if CPU else 4096
BLOCKS = 2 * PROMPT // TOKENS
ORDERS = ("lbnh",) if CPU else ("blhn", "lbhn", "lbnh")
SIZES = {"l": LAYERS, "b": BLOCKS, "h": HEADS, "n": TOKENS}
SLOT = SlotLayout(LAYERS, HEADS, TOKENS * 2 * WIDTH * 2, TOKENS)
KEY = BlockKey(bytes(16))


class Model:
    def __init__(self, torch: Any, device: str) -> None:
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=2 * HEADS * WIDTH,
            intermediate_size=1024,
            num_hidden_layers=LAYERS,
            num_attention_heads=2 * HEADS,
            num_key_value_heads=HEADS,
            head_dim=WIDTH,
            max_position_embeddings=2048,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            initializer_range=0.2,
        )
        self.torch, self.new_cache = torch, DynamicCache
        self.net = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
        words = torch.randint(0, WORDS, (1, PROMPT + 1), generator=torch.Generator().manual_seed(1))
        self.prompt = words.to(device)

    def prefilled(self) -> Any:
        cache = self.new_cache()
        with self.torch.no_grad():
            self.net(input_ids=self.prompt[:, :-1], past_key_values=cache, use_cache=True)
        return cache

    def says(self, cache: Any) -> list[int]:
        """The most likely tokens after the prompt, from this cache of it."""
        last, found = self.prompt[:, -1:], []
        with self.torch.no_grad():
            for _ in range(NEW):
                out = self.net(input_ids=last, past_key_values=cache, use_cache=True)
                last = out.logits[:, -1].argmax(-1, keepdim=True)
                found.append(int(last))
        return found


def pairs(cache: Any) -> list[tuple[Any, Any]]:
    """(K, V) of each layer, whatever the version of transformers."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


class Blocks:
    """A paged KV cache with its dimensions in this physical order, and how a worker reaches it."""

    def __init__(self, torch: Any, order: str, device: str) -> None:
        self.torch = torch
        count = BLOCKS * LAYERS * HEADS * TOKENS * 2 * WIDTH
        self.shared = SharedMemory.make(count * 2) if device == "cpu" else None
        if self.shared is not None:
            flat = torch.frombuffer(self.shared.buffer, dtype=torch.bfloat16)
        else:
            flat = torch.zeros(count, dtype=torch.bfloat16, device=device)
        self.backing = flat.view([*(SIZES[name] for name in order), 2 * WIDTH])
        self.layered = self.backing.permute([*(order.index(name) for name in "lbhn"), 4])
        self.offer, self.mark = self._offered(list(self.layered.unbind(0)))

    def _offered(self, layers: list[Any]) -> tuple[KVOffer, Callable[[], int]]:
        if self.shared is not None:
            layout = region_layout(layers, range(HEADS), self.shared.address, self.shared.byte_count)
            memory = {"kind": MemoryKind.MEMFD.value, "bytes": self.shared.byte_count}
            return KVOffer(HOST, memory, layout.fields(), self.shared.descriptor), lambda: NO_EVENT
        from kvservice.copying.cuda.offer import CudaOffer

        held = CudaOffer(layers[0], lambda address, size: region_layout(layers, range(HEADS), address, size))
        return held.offer, held.mark

    def put(self, cache: Any, blocks: list[int]) -> None:
        """Returns before the GPU has finished, so a store has to wait for it."""
        for layer, (keys, values) in enumerate(pairs(cache)):
            both = self.torch.cat([keys[0], values[0]], -1).view(HEADS, len(blocks), TOKENS, 2 * WIDTH)
            for index, block in enumerate(blocks):
                self.layered[layer, block] = both[:, index]

    def take(self, fresh: Any, blocks: list[int]) -> Any:
        for layer in range(LAYERS):
            both = self.torch.stack([self.layered[layer, block] for block in blocks], 1)
            both = both.reshape(1, HEADS, PROMPT, 2 * WIDTH)
            fresh.update(both[..., :WIDTH].contiguous(), both[..., WIDTH:].contiguous(), layer)
        return fresh


@contextmanager
def segment() -> Iterator[Segment]:
    made = Segment.create(Path(f"/dev/shm/kvservice-equal{uuid.uuid4().hex[:8]}-n"), plan_geometry(256 * MiB), "n")
    try:
        for slab in range(made.geometry.slab_count):
            made.assign_slab(slab, SLOT.payload_bytes)
        yield made
    finally:
        made.close()
        made.unlink()


def rows_of(made: Segment, blocks: list[int], generation: Generation) -> list[CopyRow]:
    """With headers that say so: reserved for an odd generation, sealed for an even one."""
    per_slab = made.geometry.slots_per_slab(SLOT.payload_bytes)
    rows = []
    for index, block in enumerate(blocks):
        slot = slot_index(index // per_slab, index % per_slab)
        digest = digest_payload(made.payload(slot, SLOT.payload_bytes), KEY)
        header = SlotHeader(made.epoch, generation, KEY, SLOT.payload_bytes, SpanRoute(0), digest, 0)
        made.write_header(slot, header)
        rows.append(CopyRow(block, slot, generation, KEY))
    return rows


def through_the_pool(torch: Any, order: str, device: str) -> dict[str, object]:
    model = Model(torch, device)
    wanted, cache = model.says(model.prefilled()), model.prefilled()
    blocks = Blocks(torch, order, device)
    used = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()
    first, second = used[: BLOCKS // 2], used[BLOCKS // 2 :]
    worker = HOST if device == "cpu" else "0"
    with segment() as made, worker_link(worker, blocks.offer, made, SLOT) as link:
        blocks.put(cache, first)
        through(link, Direction.STORE, rows_of(made, first, Generation(1)), blocks.mark)
        blocks.backing.fill_(float("nan"))
        through(link, Direction.LOAD, rows_of(made, second, Generation(2)), blocks.mark)
    back = blocks.take(model.new_cache(), second)
    same = all(
        torch.equal(one, other)
        for old, new in zip(pairs(cache), pairs(back), strict=True)
        for one, other in zip(old, new, strict=True)
    )
    found = {"same cache": same, "same tokens": model.says(back) == wanted, "different tokens": len(set(wanted))}
    if not (same and found["same tokens"]):
        raise RuntimeError(str(found))
    return found


def main() -> None:
    device = "cpu" if CPU else "cuda"
    if device == "cuda":
        torch = STAGE.torch()
    else:
        import torch

        torch.set_num_threads(1)  # several wait for each other longer than so little computing takes
    try:
        import transformers
    except ImportError as error:
        STAGE.skip(f"no transformers: {error}")
    STAGE.record("transformers", transformers.__version__)
    for order in ORDERS:
        STAGE.attempt(f"layout {order} on {device}", lambda order=order: through_the_pool(torch, order, device))


if __name__ == "__main__":
    main()
