"""Cost against scale: 10 to 10,000 nodes, 10^5 to 10^9 blocks. What a lookup partition has to do, and what gives way
first.

    python -m benchmarks.growth [--keys 400000] [--out PATH]

Unit costs are measured in this run with the production code: bytes and microseconds a key in the directory at each
number of nodes, processor time of a lookup process for a heartbeat and a lookup over gRPC, of a shard for what it
announces. Fan-out is counted with the client's own split of chains. Loads at each scale are then these costs times
rates (the options), so figures beyond one machine are extrapolated, each from its own unit cost. Queues, networks and
what years of churn do to an allocator are not modelled.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.lookup_latency import lookup_partitions
from benchmarks.report import cpu_seconds, default_out, picture_out, print_table, write_report
from kvservice.core.actions import Announce
from kvservice.core.block.keys import SPAN_BLOCKS, pack_keys, span_route
from kvservice.core.directory.announce import UPDATE_KEYS_MAX, Announcer
from kvservice.core.directory.directory import KEY_COUNT_MAX, Directory
from kvservice.core.directory.membership import MEMBERS_MAX
from kvservice.core.messages import Holder
from kvservice.lookup.client import split_chain
from kvservice.lookup.watch import QUEUE_BYTES_MAX, SUBSCRIBERS_MAX
from kvservice.units import BlockKey, BootEpoch, NodeId
from kvservice.wire.codec import encode_holder
from kvservice.wire.serving import CHANNEL_OPTIONS
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc
from kvservice.wire.versions import PROTOCOL_VERSION

NODES = (10, 100, 1000, 10_000)
SCALES = ((10, 10**5), (10, 10**6), (100, 10**7), (1000, 10**8), (10_000, 10**9))
LOOKUPS = (1, 2, 4, 8, 16, 32, 64)
RUN_BLOCKS = 64  # consecutive blocks with the same holders
BUSY_SHARE = 0.7  # of a core: beyond, answers wait
KEY_BYTES = 16
NETWORK_BYTES_PER_SECOND = 12.5e9
MIRROR_BYTES_PER_KEY = 64  # what a node may pay for a copy of the directory of its own
CALLS = 4000
IN_FLIGHT = 32


@dataclass(frozen=True, slots=True)
class Load:
    """The load that one node makes."""

    prompts_per_second: float
    prompt_blocks: int
    new_blocks_per_second: float  # stored; a full pool evicts as many
    heartbeat_seconds: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs, in seconds of a core or in bytes. Costs that depend on the number of nodes are dictionaries."""

    bytes_per_key: dict[int, float]
    add_per_key: dict[int, float]
    resolve_per_key: dict[int, float]
    first_resolve: dict[int, float]  # of 512 keys after any change of membership
    rebuild_per_key: dict[int, float]  # on the lookup partition, in announcements as large as they come
    announce_per_key: float  # on the shard
    snapshot_per_key: float  # on the shard, for each lookup partition
    heartbeat_call: float  # on the lookup partition
    resolve_call: float  # without keys


def holders(count: int) -> list[Holder]:
    return [Holder(NodeId(f"node-{i:05}"), f"10.0.{i >> 8}.{i & 255}:7000", BootEpoch(1)) for i in range(count)]


def make_keys(count: int) -> list[BlockKey]:
    packed = random.Random(1).randbytes(16 * count)
    return [BlockKey(packed[i : i + 16]) for i in range(0, len(packed), 16)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(work: Callable[[], object]) -> float:
    """Processor seconds, so that other load on the machine does not count."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measure_directory(node_count: int, key_count: int) -> tuple[float, float, float, float, float]:
    """Bytes a key; seconds a key added, a key resolved; seconds of a first resolve, and of a key that comes again with
    all others of its node. Each run of blocks has two of the
    nodes as holders, which is as mixed as it gets. Call it in a new process: what others freed would be used again."""
    noise = random.Random(2)
    keys = make_keys(key_count)
    nodes = holders(node_count)
    directory = Directory(hide_seconds=1e9, forget_seconds=2e9, key_count_max=2 * len(keys))
    sequences = dict.fromkeys(range(node_count), 1)
    for node in nodes:
        directory.apply(node, 1, full_begin=True, full_end=True, now=0.0)
    gc.collect()
    before = resident_bytes()
    begun = time.process_time()
    for start in range(0, len(keys), RUN_BLOCKS):
        run = pack_keys(keys[start : start + RUN_BLOCKS])
        for place in noise.sample(range(node_count), 2):
            sequences[place] += 1
            directory.apply(nodes[place], sequences[place], run, now=0.0)
    seconds = time.process_time() - begun
    gc.collect()
    used = resident_bytes() - before
    chains = [keys[start : start + 512] for start in range(0, min(len(keys), 1 << 17) - 512, 512)]
    first = timed(lambda: directory.resolve(chains[0], 0.0))
    for chain in chains:
        directory.resolve(chain, 0.0)  # holders of each mask are looked up once
    resolve = min(timed(lambda: [directory.resolve(chain, 0.0) for chain in chains]) for _ in range(3))
    announced = [pack_keys(keys[start : start + UPDATE_KEYS_MAX]) for start in range(0, len(keys), UPDATE_KEYS_MAX)]
    fresh = Directory(hide_seconds=1e9, forget_seconds=2e9, key_count_max=2 * len(keys))
    again = timed(
        lambda: [
            fresh.apply(nodes[0], number, packed, full_begin=number == 1, now=0.0)
            for number, packed in enumerate(announced, 1)
        ]
    )
    return used / len(keys), seconds / (2 * len(keys)), resolve / (512 * len(chains)), first, again / len(keys)


def measure_announcer(keys: list[BlockKey], partitions: int) -> tuple[float, float]:
    """Seconds a change; seconds a block and lookup partition when everything is announced."""
    inventory = [(key, span_route(keys, i)) for i, key in enumerate(keys)]
    announcer = Announcer(partitions, lambda: inventory)
    snapshot = timed(lambda: [announcer.next_update(partition) for partition in range(partitions)])
    one = Announcer(1, list)
    one.next_update(0)
    part = inventory[:100_000]

    def change() -> None:
        one.change([Announce(key, route) for key, route in part])

    return timed(change) / len(part), snapshot / (partitions * len(keys))


async def measure_calls(address: str, pid: int) -> tuple[float, float]:
    """Processor seconds of a lookup process for one heartbeat, and for a lookup without keys."""
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    stub = lookup_pb2_grpc.LookupServiceStub(channel)
    nodes = [encode_holder(node) for node in holders(IN_FLIGHT)]

    async def beat(place: int, sequence: int) -> None:
        first = sequence == 1
        await stub.Announce(
            lookup_pb2.AnnounceRequest(
                node=nodes[place],
                sequence=sequence,
                full_begin=first,
                full_end=first,
                partition=0,
                partition_count=1,
                protocol_version=PROTOCOL_VERSION,
            ),
            timeout=10,
        )

    async def beats(place: int) -> None:
        for sequence in range(1, CALLS // IN_FLIGHT + 1):
            await beat(place, sequence)

    async def asks(_: int) -> None:
        for _ in range(CALLS // IN_FLIGHT):
            await stub.Resolve(lookup_pb2.ResolveRequest(keys=pack_keys([])), timeout=10)

    found: list[float] = []
    for work in (beats, asks):
        before = cpu_seconds(pid)
        await asyncio.gather(*(work(place) for place in range(IN_FLIGHT)))
        found.append((cpu_seconds(pid) - before) / (CALLS // IN_FLIGHT * IN_FLIGHT))
    await channel.close()
    return found[0], found[1]


def child_of_this_process() -> int:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return int(children[-1])


def measure_fan_out(prompt_blocks: int) -> dict[int, float]:
    """Lookup partitions that one prompt's lookup touches, by how many there are. By the client's own split."""
    keys = make_keys(prompt_blocks * 100)
    chains = [keys[i : i + prompt_blocks] for i in range(0, len(keys), prompt_blocks)]
    return {count: sum(len(split_chain(chain, 0, count)) for chain in chains) / len(chains) for count in LOOKUPS}


def measure(key_count: int) -> Costs:
    of_nodes: dict[int, tuple[float, float, float, float, float]] = {}
    for count in NODES:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            of_nodes[count] = process.submit(measure_directory, count, key_count).result()
    change, snapshot = measure_announcer(make_keys(min(key_count, 200_000)), 8)
    with lookup_partitions(1) as (addresses, _):
        heartbeat, resolve = asyncio.run(measure_calls(addresses[0], child_of_this_process()))
    return Costs(
        *({count: found[place] for count, found in of_nodes.items()} for place in range(5)),
        change,
        snapshot,
        heartbeat,
        resolve,
    )


def load_of_partition(
    nodes: int, lookups: int, load: Load, costs: Costs, fan_out: dict[int, float]
) -> dict[str, float]:
    """The cores that one lookup partition keeps busy, by kind of work."""
    beats = 1 / load.heartbeat_seconds
    spans = 2 * load.new_blocks_per_second / SPAN_BLOCKS / lookups
    changes = 2 * load.new_blocks_per_second / lookups
    asked = load.prompts_per_second * load.prompt_blocks / lookups
    return {
        "heartbeats": nodes * max(beats - spans, 0.0) * costs.heartbeat_call,
        "updates": nodes * (spans * costs.heartbeat_call + changes * costs.add_per_key[nodes]),
        "lookups": nodes
        * (
            load.prompts_per_second * fan_out[lookups] / lookups * costs.resolve_call
            + asked * costs.resolve_per_key[nodes]
        ),
    }


def judge(nodes: int, blocks: int, load: Load, costs: Costs, fan_out: dict[int, float]) -> dict[str, object]:
    """The fewest lookup partitions that carry the load, and what it costs then; or what fails first if none do."""
    broken: list[str] = []
    lookups = LOOKUPS[-1]
    for lookups in LOOKUPS:
        parts = load_of_partition(nodes, lookups, load, costs, fan_out)
        broken = []
        if blocks / lookups > KEY_COUNT_MAX:
            broken.append("keys of one lookup partition")
        if sum(parts.values()) > BUSY_SHARE:
            broken.append(f"cores of one lookup partition, most for {max(parts, key=lambda name: parts[name])}")
        if not broken:
            break
    if nodes > MEMBERS_MAX:
        broken.append("members of a lookup partition")
    changes = 2 * load.new_blocks_per_second * nodes * KEY_BYTES
    per_node = blocks / nodes
    if nodes > SUBSCRIBERS_MAX:
        broken.append(f"a mirror on every node: {SUBSCRIBERS_MAX} watchers")
    if nodes * changes / lookups > NETWORK_BYTES_PER_SECOND:
        broken.append("a mirror on every node: the network of a lookup partition")
    return {
        "nodes": nodes,
        "blocks": blocks,
        "lookup_partitions": lookups,
        "gives_way": broken,
        "cores_of_a_lookup_partition": {name: round(value, 4) for name, value in parts.items()},
        "directory_bytes_of_a_lookup_partition": round(blocks / lookups * costs.bytes_per_key[nodes]),
        "lookups_per_second_and_core": round(
            1 / (fan_out[lookups] * costs.resolve_call + load.prompt_blocks * costs.resolve_per_key[nodes])
        ),
        "fan_out": round(fan_out[lookups], 2),
        "announced_bytes_per_second_of_a_lookup_partition": round(changes / lookups),
        "heartbeats_per_second_of_a_lookup_partition": round(nodes / load.heartbeat_seconds),
        "heartbeats_per_second_of_a_node": round(lookups / load.heartbeat_seconds, 2),
        "rebuild_seconds_of_a_lookup_partition": round(blocks / lookups * costs.rebuild_per_key[nodes], 2),
        "rebuild_bytes_of_a_lookup_partition": round(blocks / lookups * KEY_BYTES),
        "full_announcement_seconds_of_a_node": round(per_node * lookups * costs.snapshot_per_key, 3),
        "first_lookup_after_a_change_of_members_ms": round(costs.first_resolve[nodes] * 1e3, 3),
        "mirror_bytes_of_a_node": blocks * MIRROR_BYTES_PER_KEY,
        "mirror_updates_per_second_of_a_node": round(2 * load.new_blocks_per_second * nodes),
        "mirrors_bytes_per_second_of_a_lookup_partition": round(min(nodes, SUBSCRIBERS_MAX) * changes / lookups),
        "watch_queue_seconds": round(QUEUE_BYTES_MAX / (changes / lookups), 2),
    }


def draw(rows: list[dict[str, object]], costs: Costs, load: Load, fan_out: dict[int, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for lookups in (2, 8, 64):
        parts = [load_of_partition(nodes, lookups, load, costs, fan_out) for nodes in NODES]
        left.plot(NODES, [sum(part.values()) for part in parts], marker="o", label=f"{lookups} lookup partitions")
    beats = [load_of_partition(nodes, 64, load, costs, fan_out)["heartbeats"] for nodes in NODES]
    left.plot(NODES, beats, linestyle="--", label="of it heartbeats, 64 lookup partitions")
    left.axhline(BUSY_SHARE, color="grey", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="nodes", ylabel="cores of one lookup partition")
    left.set_title("Load of the directory")
    right.plot(NODES, [costs.bytes_per_key[count] for count in NODES], marker="o", label="bytes a key")
    right.plot(NODES, [costs.add_per_key[count] * 1e9 for count in NODES], marker="o", label="ns a key announced")
    right.plot(NODES, [costs.resolve_per_key[count] * 1e9 for count in NODES], marker="o", label="ns a key looked up")
    right.set(xscale="log", xlabel="nodes", title="Unit costs, measured", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=400_000, help="keys in the directory that is measured")
    parser.add_argument("--prompts", type=float, default=4.0, help="prompts per second and node")
    parser.add_argument("--prompt-blocks", type=int, default=512, help="blocks of a prompt, of 16 tokens each")
    parser.add_argument(
        "--new-blocks",
        type=float,
        default=500.0,
        help="new blocks per second and node; 500 are 8,000 tokens of prefill",
    )
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds between heartbeats")
    parser.add_argument("--out", type=Path, default=default_out("growth"))
    given = parser.parse_args()
    load = Load(given.prompts, given.prompt_blocks, given.new_blocks, given.heartbeat)
    costs = measure(given.keys)
    fan_out = measure_fan_out(given.prompt_blocks)
    rows = [judge(nodes, blocks, load, costs, fan_out) for nodes, blocks in SCALES]
    rare = Load(load.prompts_per_second, load.prompt_blocks, load.new_blocks_per_second, 10 * load.heartbeat_seconds)
    eased = [judge(nodes, blocks, rare, costs, fan_out) for nodes, blocks in SCALES]
    names = [name for name in rows[0] if name not in ("nodes", "gives_way", "cores_of_a_lookup_partition")]
    headings = ["nodes", *(str(row["nodes"]) for row in rows)]
    print_table(headings, [[name, *(row[name] for row in rows)] for name in names])
    for row, other in zip(rows, eased, strict=True):
        print(row["nodes"], "nodes:", row["cores_of_a_lookup_partition"], row["gives_way"] or "nothing gives way")
        print(
            "  with a tenth of the heartbeats:",
            other["lookup_partitions"],
            other["gives_way"] or "nothing gives way",
        )
    units = {
        name: {str(count): round(number, 12) for count, number in value.items()} if isinstance(value, dict) else value
        for name in Costs.__slots__
        for value in [getattr(costs, name)]
    }
    draw(rows, costs, load, fan_out, picture_out(given.out))
    figures = {
        "measured_with_keys": given.keys,
        "rates": {name: getattr(load, name) for name in Load.__slots__},
        "unit_costs_in_seconds_of_a_core_and_bytes": units,
        "fan_out_by_lookup_partitions": fan_out,
        "scales": rows,
        "scales_with_a_tenth_of_the_heartbeats": eased,
    }
    print(write_report("growth", figures, given.out))


if __name__ == "__main__":
    main()
