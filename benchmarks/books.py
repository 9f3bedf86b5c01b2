"""What the books of a block cost: bytes of heap for each block that a shard holds, by where they were allocated.

    python -m benchmarks.books [--blocks 100000] [--before TREE] [--out PATH]

One process fills the core's state with blocks, as engines store them, with Python's own account of allocations on; a
second one without it, and the growth of its resident memory says what the allocator adds. No block has any bytes.
With `--before`, the root of another checkout, that tree's totals stand beside. What the eviction policy keeps is
counted apart.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAIN_BLOCKS = 512
STEP_BLOCKS = 16  # sealed by one call: what a step of an engine fills
PAYLOAD_BYTES = 4096
POLICY_FILES = ("eviction", "guard", "kinds", "orders", "shadows", "stretches", "worth", "worths")  # of core/store
ROWS = {
    "blocks": "records of blocks, and the table by key",
    "slots": "records of slots",
    "books": "keys and numbers as they came",
    "geometry": "indices of slots",
    **dict.fromkeys(POLICY_FILES, "policy"),
}


def fill(count: int) -> object:
    """A shard with so many blocks. Run in the tree that is measured: the imports are that tree's."""
    from kvservice.core import events as ev
    from kvservice.core.actions import Digest
    from kvservice.core.block.keys import span_route
    from kvservice.core.messages import SealItem
    from kvservice.core.segment.geometry import plan_geometry
    from kvservice.core.shard import ShardState
    from kvservice.testing.builders import make_spec
    from kvservice.units import BlockKey, BootEpoch, MiB, NodeId

    pool_bytes = max(2 * count * (PAYLOAD_BYTES + 64), 64 * MiB)
    state = ShardState(NodeId("n0"), BootEpoch(1), plan_geometry(pool_bytes), wall_offset=1e9)
    slot_digest = getattr(ev, "SlotDigest", None)
    op, now = 1, 100.0

    def handle(make: type, *fields: object) -> list[object]:
        nonlocal op, now
        op, now = op + 1, now + 0.001
        actions = list(state.handle(make(op, *fields), now))
        while actions and type(actions[-1]).__name__ == "NextTurn":
            actions += state.handle(ev.GoOn(op), now)
        return actions

    def reply(actions: list[object]) -> object:
        return next(action.value for action in actions if type(action).__name__ == "Reply")

    attachment = reply(handle(ev.Attach, make_spec(payload_bytes=PAYLOAD_BYTES), "")).attachment
    for number in range(-(-count // CHAIN_BLOCKS)):
        names = [struct.pack("<QQ", number, index) for index in range(min(CHAIN_BLOCKS, count - number * CHAIN_BLOCKS))]
        keys = [BlockKey(hashlib.blake2b(name, digest_size=16).digest()) for name in names]
        for start in range(0, len(keys), STEP_BLOCKS):
            step = range(start, min(start + STEP_BLOCKS, len(keys)))
            refs = reply(handle(ev.Reserve, attachment, len(step)))
            # Each key comes in a message of its own, and again as the parent of the next one.
            items = tuple(
                SealItem(
                    ref, bytes(bytearray(keys[i])), bytes(bytearray(keys[i - 1])) if i else None, i, span_route(keys, i)
                )
                for ref, i in zip(refs, step, strict=True)
            )
            wanted = [action for action in handle(ev.Seal, attachment, items) if isinstance(action, Digest)]
            digests = [(each.slot, each.key, hash(each.key) & ((1 << 64) - 1) | 1 << 63) for each in wanted]
            now += 0.001
            if slot_digest is None:
                for found in digests:
                    state.handle(ev.Digested(*found), now + 1e-6)
            else:
                state.handle(ev.Digested(tuple(slot_digest(*found) for found in digests)), now)
    assert len(state.blocks()) == count
    return state


def traced(count: int) -> dict[str, float]:
    """Bytes a block, by the part of the code that allocated them."""
    fill(1000)  # imports, and what all shards of a process share
    tracemalloc.start()
    gc.collect()
    before = tracemalloc.take_snapshot()
    state = fill(count)
    gc.collect()
    after = tracemalloc.take_snapshot()
    found: dict[str, float] = {}
    for entry in after.compare_to(before, "filename"):
        path = Path(entry.traceback[0].filename)
        name = ROWS.get(path.stem, "the rest") if path.parent.name in ("store", "segment", "benchmarks") else "the rest"
        found[name] = found.get(name, 0.0) + entry.size_diff / count
    del state
    return found


def resident(count: int) -> dict[str, float]:
    def anonymous() -> int:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024

    fill(1000)
    gc.collect()
    before = anonymous()
    state = fill(count)
    gc.collect()
    grown = anonymous() - before
    del state
    return {"resident": grown / count}


def sample(tree: Path, count: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for how in ("--traced", "--resident"):
        command = [sys.executable, str(Path(__file__).resolve()), how, "--blocks", str(count)]
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "1"}
        found.update(json.loads(subprocess.check_output(command, cwd=tree, env=environment)))
    return found


def summary(parts: dict[str, float]) -> dict[str, object]:
    rows = {name: round(value) for name, value in parts.items() if name != "resident" and value >= 0.5}
    books = sum(value for name, value in parts.items() if name not in ("resident", "policy"))
    policy = parts.get("policy", 0.0)
    return {
        "books": round(books),
        "policy": round(policy),
        "resident": round(parts["resident"]),
        # What the allocator adds, in proportion: it rounds each object up.
        "books_resident": round(parts["resident"] * books / (books + policy)),
        "rows": dict(sorted(rows.items(), key=lambda row: -row[1])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--before", type=Path, help="root of another checkout, whose totals stand beside")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.traced or options.resident:
        print(json.dumps((traced if options.traced else resident)(options.blocks)))
        return
    from benchmarks.report import print_table, write_report

    figures: dict[str, object] = {"blocks": options.blocks, **summary(sample(ROOT, options.blocks))}
    if options.before is not None:
        figures["base"] = summary(sample(options.before.resolve(), options.blocks))
    trees = [("this tree", figures), *([("base", figures["base"])] if "base" in figures else [])]
    names = ("books", "policy", "resident", "books_resident")
    print_table(
        ("bytes a block", *(name.replace("_", ", ") for name in names)),
        [(who, *(f[n] for n in names)) for who, f in trees],
    )
    print_table(("of it", "bytes"), list(figures["rows"].items()))
    print(write_report("books", figures, options.out))


if __name__ == "__main__":
    main()
