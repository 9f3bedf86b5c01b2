"""`make mutants-conformance`: one small change of the product for each scenario of tests/conformance, which must fail.

A scenario that passes with its plant shows nothing of the mechanism that it retells. Each plant is a text that stands
once in a file and what to put there instead; everything runs on a copy of the tree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import ROOT, Mutant, Outcome, check_sound, copy_tree, run

SECONDS_MAX = 600  # for one scenario, on a machine that does other things: importing vLLM may take minutes there


@dataclass(frozen=True, slots=True)
class Plant:
    scenario: str  # file::name of a test, from tests/
    says: str
    file: str
    old: str
    new: str

    def mutant(self) -> Mutant:
        """Raises ValueError unless the text stands there exactly once."""
        source = (ROOT / self.file).read_bytes()
        old = self.old.encode()
        if source.count(old) != 1:
            raise ValueError(f"{self.file} should have {self.old!r} once, and has it {source.count(old)} times")
        begin = source.index(old)
        line = source.count(b"\n", 0, begin) + 1
        return Mutant(Path(self.file), line, self.says, (begin, begin + len(old)), self.new)


OFFLOAD = "conformance/test_cpu_offload.py"
INTERFACE = "conformance/test_connector_interface.py"
CHUNKS = "conformance/test_chunk_connector.py"
BLEND = "unit/engine/test_blend.py"
CALLS = "unit/connector/vllm/test_engine_calls.py"
PAGED = "conformance/test_paged_memory.py"
HOST = "conformance/test_host_tier.py"
LOOP = "unit/engine/test_loop.py"
SCHEDULER = "kvservice/connector/scheduler"
BLOCKS = "kvservice/engine/blocks.py"
PLANTS = (
    Plant(
        f"{OFFLOAD}::simple_cpu_offload_walk_through",
        "the device's blocks keep a reference when their store has ended",
        f"{SCHEDULER}/stores.py",
        "self._pins.unpin(store.block_ids)",
        "self._pins.unpin(store.block_ids[1:])",
    ),
    Plant(
        f"{OFFLOAD}::sizes_of_the_example",
        "a layer has one head",
        "kvservice/core/segment/layout.py",
        "return self.kv_head_count * self.cell_bytes",
        "return self.cell_bytes",
    ),
    Plant(
        f"{OFFLOAD}::three_and_seven_tokens",
        "of a tail one token more is promised than it has",
        f"{SCHEDULER}/tailed.py",
        "end = min(begin + tail_now.tokens, total_tokens)",
        "end = min(begin + tail_now.tokens + 1, total_tokens)",
    ),
    Plant(
        f"{OFFLOAD}::three_and_seven_tokens",
        "a tail is stored with what others left in its block",
        "kvservice/connector/worker/half.py",
        "self._to_write(store) if entry.tokens]",
        "self._to_write(store) if False]",
    ),
    Plant(
        f"{OFFLOAD}::three_and_seven_tokens_as_whole_blocks",
        "a hit is one block longer than what is there",
        f"{SCHEDULER}/half.py",
        "Promise(max(end * self._block_tokens - computed_tokens, 0))",
        "Promise(max((end + 1) * self._block_tokens - computed_tokens, 0))",
    ),
    Plant(
        f"{OFFLOAD}::the_engine_takes_the_leading_part_of_a_promise",
        "the whole promise is loaded",
        f"{SCHEDULER}/half.py",
        "blocks=result.blocks[: end - request.skip]",
        "blocks=result.blocks",
    ),
    Plant(
        f"{INTERFACE}::store_is_submitted_in_the_next_step",
        "stores are not deferred",
        "kvservice/connector/worker/half.py",
        "self._deferred += plan.stores",
        "self._start_stores(plan.stores)",
    ),
    Plant(
        f"{INTERFACE}::gds_file_format",
        "a file's payload is not compared with its digest",
        "kvservice/core/segment/blockfile.py",
        "if not header.codec and digest_payload",
        "if header.codec and digest_payload",
    ),
    Plant(
        f"{INTERFACE}::file_system_decides",
        "the first mount point that fits counts, and not the longest",
        "kvservice/tier/mounts.py",
        "len(mount.path.parts) >= len(found.path.parts)",
        "found.kind == UNKNOWN",
    ),
    Plant(
        f"{CALLS}::copies_are_where_the_step_has_them",
        "stores start before the forward",
        "kvservice/connector/vllm/connector.py",
        "self._copying.loads_started(self._worker.start_loads(plan))",
        "self._worker.store(plan)\n                self._copying.loads_started(self._worker.start_loads(plan))",
    ),
    Plant(
        f"{CHUNKS}::three_hundred_tokens_have_eighteen_names",
        "a block's name does not depend on the tokens before",
        "kvservice/core/block/keys.py",
        "hashlib.sha256(parent + tokens[start : start + size])",
        "hashlib.sha256(tokens[start : start + size])",
    ),
    Plant(
        f"{CHUNKS}::mask_alignment",
        "blocks that the engine has are loaded again",
        "kvservice/connector/cache_groups.py",
        "if place[1] >= own]",
        "if place[1] >= 0]",
    ),
    Plant(
        f"{CHUNKS}::three_hundred_tokens_are_one_chunk_and_a_rest",
        "a chunk is named by its first block",
        f"{SCHEDULER}/request_keys.py",
        "hashes[begin * self._stride + last : end",
        "hashes[begin * self._stride : end",
    ),
    Plant(
        f"{CHUNKS}::failed_blocks",
        "a loaded block is not compared with its digest",
        "kvservice/connector/worker/half.py",
        "if found != digest:",
        "if False:",
    ),
    Plant(
        f"{CHUNKS}::prefetch_two",
        "three layers ahead",
        "kvservice/connector/layerwise/lanes.py",
        "LAYERS_AHEAD = 2",
        "LAYERS_AHEAD = 3",
    ),
    Plant(
        f"{CHUNKS}::prefetch_before_delete_before_put",
        "the least urgent work is done first",
        "kvservice/tier/worker.py",
        "(one for one in self._waiting if one)",
        "(one for one in reversed(self._waiting) if one)",
    ),
    Plant(
        f"{PAGED}::block_table_and_slots",
        "a token's slot is one block further",
        BLOCKS,
        "block = table[token // block_tokens]",
        "block = table[token // block_tokens] + 1",
    ),
    Plant(
        f"{PAGED}::three_hundred_tokens",
        "a part of a block has a name",
        "kvservice/core/block/keys.py",
        "range(0, min(len(tokens) // size, count_max) * size, size)",
        "range(0, min(-(-len(tokens) // size), count_max) * size, size)",
    ),
    Plant(
        f"{PAGED}::swap_chain",
        "a table keeps the numbers of the device that its blocks left",
        BLOCKS,
        "sequence.table[position] = moved[block_id]",
        "moved[block_id]",
    ),
    Plant(
        f"{PAGED}::a_full_host_means_computing_again",
        "one block more than the host has is swapped out",
        BLOCKS,
        "return len(self.blocks_of(sequences)) <= self.host.free_count",
        "return len(self.blocks_of(sequences)) <= self.host.free_count + 1",
    ),
    Plant(
        f"{PAGED}::bytes_of_all_layers_come_back_elsewhere",
        "the pairs of a swap belong to other blocks",
        BLOCKS,
        "return list(moved.items())",
        "return list(zip(moved, [*moved.values()][1:] + [*moved.values()][:1]))",
    ),
    Plant(
        f"{PAGED}::fork",
        "a fork does not count on the blocks that it shares",
        BLOCKS,
        "(self.host if sequence.on_host else self.device).share(block_id)",
        "(self.host if sequence.on_host else self.device).refs(block_id)",
    ),
    Plant(
        f"{PAGED}::watermark",
        "the watermark is one block lower",
        BLOCKS,
        ">= self.watermark_blocks else Room.LATER",
        ">= self.watermark_blocks - 1 else Room.LATER",
    ),
    Plant(
        f"{PAGED}::bad_devices",
        "a swap within the host is tried",
        "kvservice/engine/paged.py",
        'if "cuda" not in (source.device.type, target.device.type):',
        "if source.device != target.device:",
    ),
    Plant(
        f"{HOST}::a_block_goes_to_the_host_and_comes_back",
        "blocks that go to the host stay in use on the device",
        BLOCKS,
        "source.free(block_id)\n            sequence.on_host",
        "source.refs(block_id)\n            sequence.on_host",
    ),
    Plant(
        f"{HOST}::a_slot_that_changes_meanwhile_is_not_loaded",
        "a slot's header is not read again after the copy",
        "kvservice/connector/worker/half.py",
        "changed = (segment.header_rows(slots) != before).any(axis=1)",
        "changed = (before != before).any(axis=1)",
    ),
    Plant(
        f"{LOOP}::a_step_is_done_in_its_order",
        "blocks are copied before others are swapped out",
        "kvservice/engine/loop.py",
        """        self._swap(record, step)
        record.lap("swap")
        if step.copy:
            self.model.kv.copy_blocks(torch.tensor(step.copy, dtype=torch.int64))
""",
        """        if step.copy:
            self.model.kv.copy_blocks(torch.tensor(step.copy, dtype=torch.int64))
        self._swap(record, step)
        record.lap("swap")
""",
    ),
    Plant(
        f"{BLEND}::ratio_zero_is_plain_reuse",
        "keys stay turned for the place where they were computed",
        "kvservice/engine/blend.py",
        "self.move(kv[:, 0, :, begin:end], begin)",
        "self.move(kv[:, 0, :, begin:end], 0)",
    ),
    Plant(
        f"{BLEND}::tokens_that_deviate_most_are_computed",
        "deviations of opposite sign cancel out",
        "kvservice/engine/blend.py",
        ".float()).square().sum((0, 2))",
        ".float()).sum((0, 2))",
    ),
    Plant(
        f"{BLEND}::ratio_one_is_full_prefill_bit_for_bit",
        "one token less is computed again than the ratio says",
        "kvservice/engine/blend.py",
        "math.ceil(share * found)",
        "math.ceil(share * found) - 1",
    ),
    Plant(
        f"{BLEND}::what_the_pool_lost_is_computed",
        "a chunk counts as cached whatever the pool had of it",
        "kvservice/engine/blend.py",
        "is_cached[begin:end] = True",
        "is_cached[begin : begin + len(piece)] = True",
    ),
    Plant(
        f"{BLEND}::chunks_and_blends_never_have_prefix_names",
        "the chain of a chunk begins like that of a prompt",
        "kvservice/engine/blend.py",
        'ROOT = "chunks", 1, "kvservice/blend/1"',
        'ROOT = "chunks", 1, ""',
    ),
)


def test_of(plant: Plant) -> Path:
    place, _, name = plant.scenario.rpartition("::")
    return Path(f"tests/{place}::test_{name}" if name[0].islower() else f"tests/{place}::{name}")


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description="Plant a change of the product for each example of tests/conformance.")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of plants, from 1")
    only, survivors = parser.parse_args(arguments).only, 0
    with tempfile.TemporaryDirectory(prefix="kvservice-plants-") as folder:
        tree = copy_tree(Path(folder))
        chosen = [(number, plant) for number, plant in enumerate(PLANTS, 1) if not only or number in only]
        check_sound(tree, sorted({str(test_of(plant)) for _, plant in chosen}), SECONDS_MAX * len(chosen))
        for number, plant in chosen:
            began = time.monotonic()
            outcome, _ = run(plant.mutant(), tree, [test_of(plant)], SECONDS_MAX, are_sound=True)
            survivors += outcome is not Outcome.KILLED
            seconds = time.monotonic() - began
            print(f"{number:3} {outcome.value:9} {seconds:4.0f} s  {plant.scenario}: {plant.says}", flush=True)
    print(f"{survivors} not noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
