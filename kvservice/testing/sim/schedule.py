"""What happens in one run, as plain values: made from a seed, printed, reduced, played again.

A schedule is data, so the shortest one that still fails can be found by leaving parts of it out.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, replace
from typing import Literal

from kvservice.config import LOOKUP_PARTITIONS_MAX
from kvservice.testing.builders import SMALL
from kvservice.testing.sim.ages import NEVER_SECONDS, SOON_SECONDS
from kvservice.testing.sim.memory import SCALED
from kvservice.units import BlockHash

# What an operator clears.
ClearKind = Literal["everything", "prompt", "tenant", "model"]
CLEARS: tuple[ClearKind, ...] = ("everything", "prompt", "prompt", "tenant", "model")
HEARS_SECONDS_MAX = 1.5  # until the last node hears of a clear, if it lives
FAULTS_SECONDS = 3.0  # Virtual seconds with faults. After them everything is healed.
PROMPTS = 3  # Prompts that requests begin with: few, so that many requests share blocks.
# Of a wide schedule: a prompt begins with its number in one byte; a node asks as often as in a small schedule, and has
# faults more seldom, so that most of them meet nodes that still work; a lookup partition has as many nodes as the page
# of growth gives it.
WIDE_PROMPTS_MAX, ASKS_PER_NODE, NODES_PER_FAULT, NODES_PER_LOOKUP = 256, 4, 4, 250
# Few blocks already lead to every state, and short runs can be played by the thousand.
PROMPT_BLOCKS_MAX = 8

# What devices of tiers do. All last for the seconds of the fault, but for these: `torn` acts when the node dies next,
# `unusable`, `old_index` and `stale` when it starts; `flip`, `mix_up` and `vanish` change what is there.
TIER_FAULTS = tuple(
    f"tier_{kind}"
    for kind in (
        *("full", "slow", "error", "late", "hang"),
        *("torn", "unusable", "old_index", "stale"),
        *("flip", "mix_up", "vanish"),
    )
)
# kind -> how often, relative to the others
FAULTS: dict[str, int] = {
    "crash_node": 5,
    "crash_node_at_store": 4,
    "crash_node_at_move": 0,  # drawn separately
    "lose_node": 2,
    "pause_node": 4,
    "crash_engine": 4,
    "crash_at_store": 5,
    "pause_engine": 2,
    "pause_at_answer": 4,
    "crash_lookup": 3,
    "pause_lookup": 1,
    "cut_one_way": 4,
    "cut": 3,
    "loss": 3,
    "twice": 3,
    "slow": 3,
    "garble": 3,
    "flip": 2,
    "flip_header": 2,
    "swap": 2,
    "transplant": 2,
    "wedge": 7,
    "abort": 6,
    "drain": 1,
    "stop_node": 3,
    "stop_engine": 2,
    "freeze_node": 2,
    "freeze_engine": 2,
    "freeze_lookup": 1,
    "line_loss": 4,
    "line_twice": 3,
    "line_slow": 4,
    "reset": 0,  # as well, as those of tiers are
    "mute_node": 0,  # as well
    "cut_short": 0,  # and this: the segment of a node, which then dies
    **dict.fromkeys(TIER_FAULTS, 0),
}
TierWriteSetting = Literal["evicted", "stored", "reused"]  # as the settings say it
MEMORY_NODE_FAULTS = ("garble", "garble", "garble", "wedge", "crash_node", "lose_node", "pause_node")
# One schedule of so many has clears; all of these have tiers too.
CLEARS_EVERY, CLEARS_AT = 24, 14
TIERS_EVERY, TIERS_AT = 3, 2  # schedules with disks or an object store, by their seeds
CODECS_EVERY, CODECS_AT = 6, 5  # those of them with a codec
AGES_EVERY, AGES_AT = 48, 26  # those with an age limit; all of these have tiers too
MUTES_EVERY, MUTES_AT = 12, 4  # those with nodes that answer no handshake
MAPS_EVERY, MAPS_AT = 11, 10  # those whose nodes are of one machine and map each other
SIZES_EVERY, SIZES_AT = 13, 9  # those whose models have blocks of different sizes, so that slabs move
SLICES_EVERY, SLICES_AT = 8, 7  # one schedule of so many does every call a block at a time
GOING_FAULTS = ("crash_engine", "crash_engine", "stop_engine", "crash_at_store", "cut", "line_loss")
# Far longer than the leases of the simulation.
FROZEN_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. For a hand-off it is both halves: `decode_at` is the engine that continues."""

    at: float
    engine: int
    prompt: int  # the prompt that it begins with
    branch_at: int  # blocks shared with the other requests of this prompt
    branch: int
    blocks: int
    decode_at: int = -1
    decode_delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    kind: str
    target: int
    other: int
    seconds: float
    number: int  # which slot, bit or request

    def __str__(self) -> str:
        return f"{self.at:.3f} {self.kind} target={self.target} other={self.other} for {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class TimedClear:
    """An operator clears something at a moment. Each node hears of it later, and one that is down does not."""

    at: float
    what: ClearKind
    number: int  # which prompt, tenant or model
    heard: tuple[float, ...]  # seconds until each node hears of it; infinite: nobody tells it


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    nodes: int
    lookups: int
    engines: int  # engine i runs on node i mod nodes
    slabs: int  # a node's memory, 4 blocks each
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    models: int  # engine i serves model i mod models
    copy_delay: float  # seconds that stores are delayed
    rates: tuple[float, ...]  # clock rate of each node
    tenants: int = 1  # 2: engines belong to them in turn, and the first tenant has a quota
    tiers: tuple[str, ...] = ()  # of every node
    tier_write: TierWriteSetting = "evicted"
    disk_blocks: int = 0  # what the budget of each node's disk holds
    encodes: bool = False  # a codec of the tiers changes the size of blocks
    clears: tuple[TimedClear, ...] = ()
    tails: bool = False  # engines store and ask for the beginnings of blocks
    maps_peers: bool = False  # nodes read each other's memory, and not over the network
    slices: bool = False  # calls are done a block at a time, and others have their turns in between
    max_age: float = 0.0  # seconds; 0 = no limit
    sizes: tuple[int, ...] = (SMALL, SMALL)  # bytes of a block of each model
    memory_nodes: int = 0  # the last of the nodes: they accept what others evict, and have no engines


def with_memory_node(made: Schedule) -> Schedule:
    """The same schedule with one more node, for what the others evict, and with faults of that node."""
    rng = random.Random(f"memory node of {made.seed}")
    faults = [
        Fault(round(_moment(rng, list(made.asks)), 4), rng.choice(MEMORY_NODE_FAULTS), made.nodes, 0, 0.3, 0)
        for _ in range(rng.randint(0, 6))
    ]
    heard = [(*each.heard, round(rng.uniform(0.0, HEARS_SECONDS_MAX), 4)) for each in made.clears]
    clears = tuple(replace(each, heard=seconds) for each, seconds in zip(made.clears, heard, strict=True))
    made = replace(made, nodes=made.nodes + 1, rates=(*made.rates, 1.0), memory_nodes=1, clears=clears)
    return _with_faults(made, faults)


def with_deaf_nodes(made: Schedule) -> Schedule:
    """The same schedule with clears of which only the first node is told. All nodes use one object store."""
    clears = tuple(replace(each, heard=(each.heard[0], *[math.inf] * (made.nodes - 1))) for each in made.clears)
    return replace(made, clears=clears, tiers=("objects",))


def make_schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    nodes = rng.choice((2, 2, 3))
    engines = rng.choice((nodes, nodes + 1, nodes + 2))
    asks = []
    for _ in range(rng.randint(8, 20)):
        decode_at = rng.randrange(engines) if rng.random() < 0.25 else -1
        blocks = rng.randint(1, PROMPT_BLOCKS_MAX)
        asks.append(
            Ask(
                round(rng.random() * FAULTS_SECONDS, 4),
                rng.randrange(engines),
                rng.randrange(PROMPTS),
                blocks - rng.randint(0, blocks // 2),
                rng.randrange(3),
                blocks,
                decode_at,
                round(rng.random() * 0.1, 4),
            )
        )
    faults = _faults(rng, asks, rng.randint(0, 8), 12)
    made = Schedule(
        seed,
        nodes,
        rng.choice((1, 2)),
        engines,
        rng.choice((2, 2, 3, 4, 5)),
        tuple(sorted(asks, key=lambda ask: ask.at)),
        tuple(sorted(faults, key=lambda fault: fault.at)),
        rng.choice((1, 1, 1, 2)),
        rng.choice((0.0, 0.3, 0.8, 1.6)),
        tuple(round(1 + rng.uniform(-0.005, 0.005), 5) for _ in range(nodes)),
        2 if seed % 7 == 6 else 1,
    )
    # What follows is drawn last, so that nothing else of the schedule changes with it.
    if seed % 5 == 4:  # an engine's weights are changed in place
        resets = [
            Fault(round(_moment(rng, asks), 4), "reset", rng.randrange(12), 0, 0.0, 0)
            for _ in range(rng.choice((1, 1, 2)))
        ]
        made = _with_faults(made, resets)
    if seed % TIERS_EVERY == TIERS_AT:
        made = _with_tiers(made, rng, asks)
    if seed % MUTES_EVERY == MUTES_AT:
        made = _with_mutes(made)
    if seed % MAPS_EVERY == MAPS_AT:
        made = _with_mapped_peers(made)
    if seed % SIZES_EVERY == SIZES_AT:
        made = _with_sizes(made)
    if seed % SLICES_EVERY == SLICES_AT:
        made = _with_slices(made)
    if seed % AGES_EVERY == AGES_AT:
        made = _with_ages(made)
    return _with_clears(made) if seed % CLEARS_EVERY == CLEARS_AT else made


def make_wide_schedule(seed: int, nodes: int) -> Schedule:
    """Many nodes with an engine each, and faults in proportion. Without tiers, clears and tenants."""
    rng = random.Random(f"{seed} of {nodes} nodes")
    asks = []
    for _ in range(ASKS_PER_NODE * nodes):
        decode_at = rng.randrange(nodes) if rng.random() < 0.1 else -1
        blocks = rng.randint(1, PROMPT_BLOCKS_MAX)
        asks.append(
            Ask(
                round(rng.random() * FAULTS_SECONDS, 4),
                rng.randrange(nodes),
                rng.randrange(min(max(nodes // 4, PROMPTS), WIDE_PROMPTS_MAX)),
                blocks - rng.randint(0, blocks // 2),
                rng.randrange(3),
                blocks,
                decode_at,
                round(rng.random() * 0.1, 4),
            )
        )
    faults = _faults(rng, asks, nodes // NODES_PER_FAULT, 1 << 20)
    return Schedule(
        seed,
        nodes,
        min(2 + nodes // NODES_PER_LOOKUP, LOOKUP_PARTITIONS_MAX),
        nodes,
        3,
        tuple(sorted(asks, key=lambda ask: ask.at)),
        tuple(sorted(faults, key=lambda fault: fault.at)),
        models=1,
        copy_delay=0.3,
        rates=tuple(round(1 + rng.uniform(-0.005, 0.005), 5) for _ in range(nodes)),
    )


def _faults(rng: random.Random, asks: list[Ask], count: int, targets: int) -> list[Fault]:
    kinds, weights = list(FAULTS), list(FAULTS.values())
    return [
        Fault(
            round(_moment(rng, asks), 4),
            rng.choices(kinds, weights)[0],
            rng.randrange(targets),
            rng.randrange(targets),
            round(0.02 + 1.5 * rng.random() ** 2, 4),
            rng.randrange(1 << 16),
        )
        for _ in range(count)
    ]


def _with_tiers(made: Schedule, rng: random.Random, asks: list[Ask]) -> Schedule:
    faults = [
        Fault(
            round(_moment(rng, asks), 4),
            rng.choice(TIER_FAULTS),
            rng.randrange(12),
            0,
            round(0.02 + 1.5 * rng.random(), 4),
            rng.randrange(1 << 16),
        )
        for _ in range(rng.randint(0, 4))
    ]
    write: TierWriteSetting = rng.choice(("evicted", "stored", "stored", "reused"))
    return replace(
        _with_faults(made, faults),
        tiers=rng.choice((("disk",), ("disk",), ("objects",), ("disk", "objects"))),
        tier_write=write,
        disk_blocks=rng.choice((3, 8, 40)),
        encodes=made.seed % CODECS_EVERY == CODECS_AT,
    )


def _with_mutes(made: Schedule) -> Schedule:
    """Nodes that answer no handshake, mostly at the beginning, when all meet. Drawn from numbers of their own."""
    rng = random.Random(f"mutes of {made.seed}")
    mutes = [
        Fault(
            round(FAULTS_SECONDS * rng.random() ** 2, 4),
            "mute_node",
            rng.randrange(12),
            0,
            round(3.0 * rng.random(), 4),
            rng.randrange(2),
        )
        for _ in range(rng.randint(1, 4))
    ]
    return _with_faults(made, mutes)


def _with_mapped_peers(made: Schedule) -> Schedule:
    """Nodes of one machine, whose files are cut short or removed while others map them. Drawn from numbers of their
    own."""
    rng = random.Random(f"mapped peers of {made.seed}")
    asks = list(made.asks)
    faults = [
        Fault(
            round(_moment(rng, asks), 4),
            rng.choice(("cut_short", "cut_short", "lose_node", "crash_node")),
            rng.randrange(12),
            0,
            round(rng.random(), 4),
            0,
        )
        for _ in range(rng.randint(1, 4))
    ]
    return replace(_with_faults(made, faults), maps_peers=True)


def _with_sizes(made: Schedule) -> Schedule:
    """Engines of each node have blocks of different sizes, and ask twice as often, so that slabs move, also while the
    node dies. Drawn from numbers of their own."""
    rng = random.Random(f"sizes of {made.seed}")
    engines, models = 6, 5 - made.nodes  # each model has an engine on each node
    asks = tuple(
        replace(
            ask,
            at=round((ask.at + shift) % FAULTS_SECONDS, 4),
            engine=rng.randrange(engines),
            decode_at=-1 if ask.decode_at < 0 else rng.randrange(engines),
        )
        for ask in made.asks
        for shift in (0, FAULTS_SECONDS / 2)
    )
    faults = [
        Fault(
            round(_moment(rng, list(asks)), 4),
            "crash_node_at_move",
            rng.randrange(12),
            0,
            round(rng.random() ** 2, 4),
            rng.randrange(1 << 16),
        )
        for _ in range(rng.randint(0, 5))
    ]
    sizes = tuple(rng.sample(tuple(SCALED), models))
    slabs = rng.choice((3, 4, 6))
    return replace(_with_faults(made, faults), engines=engines, models=models, asks=asks, sizes=sizes, slabs=slabs)


def _with_slices(made: Schedule) -> Schedule:
    """With engines that go while their calls wait for a turn. Drawn from numbers of their own."""
    rng = random.Random(f"slices of {made.seed}")
    faults = [
        Fault(round(_moment(rng, list(made.asks)), 4), rng.choice(GOING_FAULTS), rng.randrange(12), 0, 0.5, 0)
        for _ in range(rng.randint(1, 4))
    ]
    return replace(_with_faults(made, faults), slices=True)


def _with_ages(made: Schedule) -> Schedule:
    """With an age limit. The clocks of all nodes agree, because ages go by them."""
    assert made.tiers
    limit = SOON_SECONDS if made.seed // AGES_EVERY % 2 else NEVER_SECONDS
    return replace(made, max_age=limit, rates=(1.0,) * made.nodes)


def _with_clears(made: Schedule) -> Schedule:
    """Drawn from numbers of their own, so that all other draws stay what they are. The clocks of all nodes agree,
    because a clear goes by their time."""
    rng = random.Random(f"clears of {made.seed}")
    asks = list(made.asks)
    clears = [
        TimedClear(
            round(_moment(rng, asks), 4),
            rng.choice(CLEARS),
            rng.randrange(1 << 16),
            tuple(round(HEARS_SECONDS_MAX * rng.random() ** 3, 4) for _ in range(made.nodes)),
        )
        for _ in range(rng.randint(1, 3))
    ]
    return replace(made, clears=tuple(sorted(clears, key=lambda clear: clear.at)), rates=(1.0,) * made.nodes)


def _with_faults(made: Schedule, faults: list[Fault]) -> Schedule:
    return replace(made, faults=tuple(sorted((*made.faults, *faults), key=lambda fault: fault.at)))


def _moment(rng: random.Random, asks: list[Ask]) -> float:
    """A moment, mostly shortly after a request, when there is something to break."""
    if rng.random() < 0.25:
        return rng.random() * FAULTS_SECONDS
    return rng.choice(asks).at + 0.5 * rng.random() ** 2


def hashes_of(ask: Ask) -> list[BlockHash]:
    """The chained hashes of an ask's prompt. Requests of one prompt have the same up to `branch_at`."""
    found: list[BlockHash] = []
    parent = bytes([ask.prompt])
    for position in range(ask.blocks):
        branch = bytes([ask.branch]) if position >= ask.branch_at else b""
        parent = hashlib.sha256(parent + bytes([position]) + branch).digest()
        found.append(BlockHash(parent))
    return found


def smaller(schedule: Schedule) -> list[Schedule]:
    """Schedules that leave something out, the largest cuts first."""
    found = []
    for name in ("faults", "clears", "asks"):
        parts = getattr(schedule, name)
        size = len(parts)
        width = size
        while width >= 1:
            for start in range(0, size, width):
                rest = parts[:start] + parts[start + width :]
                if len(rest) < size and (rest or name != "asks"):
                    found.append(replace(schedule, **{name: rest}))
            width //= 2
    return found
