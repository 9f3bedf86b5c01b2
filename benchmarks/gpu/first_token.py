"""Stage first_token: how long the first token of a prompt takes, computed and loaded from the pool.

A Llama of more than a billion parameters, random weights, over the reference engine's blocks. The prompt is computed
and its blocks are stored. Then they are loaded into other blocks, by the copies that an engine's own process makes, and
only the last block is computed. Both ways must choose the same token. `--cpu` tries it with a tiny model.
"""

from __future__ import annotations

import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Stage
from kvservice.core.segment.geometry import plan_geometry, slot_index
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.units import BlockKey, Generation, MiB, SlotIndex

STAGE = Stage("first_token")
CPU = "--cpu" in sys.argv
BLOCK_TOKENS = 16
PROMPTS = (64,) if CPU else (1024, 4096, 16384)
ROUNDS = 2 if CPU else 5
PINNING_SECONDS = 30.0
KEY = BlockKey(bytes(16))
SIZES: dict[str, int] = (
    {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 199}
    if CPU
    else {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "vocab_size": 128_256,
    }
)


def make_model(torch: Any, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        **SIZES,
        num_key_value_heads=SIZES["num_attention_heads"] // 4 or 1,
        max_position_embeddings=max(PROMPTS) + BLOCK_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    dtype = torch.float32 if CPU else torch.bfloat16
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


class Bench:
    """The model over twice the blocks of the longest prompt, and a pool with slots for that prompt."""

    def __init__(self, torch: Any, device: str) -> None:
        from kvservice.connector.worker.block_copier import BlockCopier
        from kvservice.connector.worker.copier import CudaCopier, in_process_copier
        from kvservice.engine.model import PagedModel

        self.torch, self.device = torch, device
        net = make_model(torch, device)
        STAGE.record("parameters", sum(one.numel() for one in net.parameters()))
        self.model = PagedModel(net, block_tokens=BLOCK_TOKENS)
        shape, self.count = self.model.shape, max(PROMPTS) // BLOCK_TOKENS
        kv = self.model.allocate(2 * self.count)
        self.slot = SlotLayout(shape.layer_count, shape.head_count, shape.cell_bytes, BLOCK_TOKENS)
        self.geometry = plan_geometry(2 * self.count * self.slot.payload_bytes + 256 * MiB)
        self.blocks = BlockCopier(kv.layers, range(shape.head_count))
        self.copier = in_process_copier(self.blocks)
        self.is_pinned: Callable[[], bool] = lambda: True
        if isinstance(self.copier, CudaCopier):
            copier = self.copier
            self.is_pinned = lambda: copier._pinning is not None and copier._pinning.covers(self.geometry.segment_bytes)

    def first(self, tokens: list[int], begin: int, table: list[int]) -> int:
        """The token after these, of which those from `begin` on are computed. Blocks until it is known."""
        from kvservice.engine.paged import TokenSpan

        logits = self.model.forward([TokenSpan(tokens[begin:], begin, table)])
        return int(logits[0].argmax())

    def move(self, direction: Any, blocks: list[int]) -> None:
        """Between the blocks and the slots of their places. Blocks until all bytes have arrived."""
        from kvservice.connector.plan import CopyEntry

        entries = [
            CopyEntry(block, BlockRef(self.slot_of(place), Generation(2)), KEY) for place, block in enumerate(blocks)
        ]
        ticket = self.copier.run(direction, entries)
        self.copier.flush()
        ticket.synchronize()
        if not ticket.succeeded():
            raise RuntimeError("the copies failed")

    def slot_of(self, place: int) -> SlotIndex:
        per_slab = self.geometry.slots_per_slab(self.slot.payload_bytes)
        return slot_index(place // per_slab, place % per_slab)

    def measure(self, length: int) -> dict[str, Any]:
        from kvservice.copying.message import Direction

        generator = self.torch.Generator().manual_seed(length)
        tokens = self.torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist()
        count = length // BLOCK_TOKENS
        places = self.torch.randperm(2 * self.count, generator=generator).tolist()
        first, second = places[:count], places[count : 2 * count]
        begin = length - BLOCK_TOKENS
        wanted = self.first(tokens, 0, first)
        self.move(Direction.STORE, first)
        found: set[int] = set()

        def loaded() -> None:
            self.move(Direction.LOAD, second[:-1])
            found.add(self.first(tokens, begin, second))

        self.model.kv.storage.index_fill_(0, self.torch.tensor(second, device=self.device), 0)
        times = {
            "computed": timed(lambda: self.first(tokens, 0, first)),
            "loaded": timed(loaded),
            "load alone": timed(lambda: self.move(Direction.LOAD, second[:-1])),
        }
        if found != {wanted}:
            raise RuntimeError(f"token {wanted} after computing, {sorted(found)} after loading")
        return {
            "same token": True,
            **{f"{name} ms": round(seconds * 1e3, 2) for name, seconds in times.items()},
            "times faster": round(times["computed"] / times["loaded"], 2),
            "load GB/s": round((count - 1) * self.slot.payload_bytes / times["load alone"] / 1e9, 2),
        }


def timed(work: Callable[[], object]) -> float:
    """Median seconds, after a round that does not count."""
    taken = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


@contextmanager
def pool_of(bench: Bench) -> Iterator[None]:
    """Memory of a pool, pinned where that is possible. Its slots' headers are not looked at: this is one process."""
    from kvservice.connector.plan import PoolInfo

    path = Path(f"/dev/shm/kvservice-first{uuid.uuid4().hex[:8]}-n")
    made = Segment.create(path, bench.geometry, "n")
    try:
        for slab in range(bench.geometry.slab_count):
            made.assign_slab(slab, bench.slot.payload_bytes)
        memory = bench.blocks.bind(made.buffer, bench.slot)
        bench.copier.adopt(memory, PoolInfo(str(path), bench.geometry, made.epoch, bench.slot, bytes(16)))
        yield
        bench.copier.release()
        bench.copier.close()
        del memory
        bench.blocks.unbind()
    finally:
        made.close()
        made.unlink()


def main() -> None:
    device = "cpu" if CPU else "cuda"
    if CPU:
        import torch

        torch.set_num_threads(1)
    else:
        torch = STAGE.torch()
    try:
        import transformers
    except ImportError as error:
        STAGE.skip(f"no transformers: {error}")
    STAGE.record("transformers", transformers.__version__)
    bench = Bench(torch, device)
    with pool_of(bench):
        # The first copy begins the pinning.
        STAGE.attempt(f"prompt of {PROMPTS[0]} tokens, the pool is being pinned", lambda: bench.measure(PROMPTS[0]))
        eventually(bench.is_pinned, "the pool pinned", PINNING_SECONDS)
        for length in PROMPTS:
            STAGE.attempt(f"prompt of {length} tokens", lambda n=length: bench.measure(n))
        STAGE.record("counters", bench.copier.take_counters())


if __name__ == "__main__":
    main()
