"""Tables of many shards on one machine, for `benchmarks.figures`."""

from __future__ import annotations

from typing import Any

from benchmarks.committed import origin

BUSY_SHARE = 0.7  # of a core, as in benchmarks.growth


def costs(document: dict[str, Any]) -> str:
    """What a request, a block and a key cost each kind of process, and how many a core carries."""
    figures = document["figures"]
    micros, memory = figures["cpu_microseconds"], figures["memory"]
    kinds = list(memory)
    rows = {
        "being there, a second": "idle_per_process_and_second",
        f"a request of {figures['blocks_per_request']} blocks that its node has": "per_request_local",
        "a block fetched from another node": "per_block_fetched",
        "a block that is stored and announced": "per_block_stored",
        "an announced key": "per_announced_key",
    }
    lines = [
        f"{origin('scale', document)}\n{figures['shards']} shards, "
        f"{figures['lookup_partitions']} lookup partitions, {figures['engines']} engines.\n",
        f"| µs of a core | {' | '.join(kinds)} |",
        "|---" * (len(kinds) + 1) + "|",
        *(f"| {what} | {' | '.join(_cost(micros[name][kind]) for kind in kinds)} |" for what, name in rows.items()),
    ]
    sizes = [f"{row['pss_without_the_pool_mib']['median']:.0f}" for row in memory.values()]
    lines.append(f"| memory of a process without the pool, MiB (PSS) | {' | '.join(sizes)} |")
    shard, lookup = kinds[:2]
    a_request = micros["per_request_local"][shard]
    a_key = micros["per_announced_key"][lookup]
    lines.append(
        f"\nThe process of engines also makes and compares the bytes. At {BUSY_SHARE:.0%} of a core a shard carries "
        f"{_rate(a_request, 'such requests', ' a second')},\nand a lookup partition {_rate(a_key, 'announced keys')}."
    )
    return "\n".join(lines)


def _cost(micros: float) -> str:
    """What processes cost by being there was taken off, so nothing may come out below zero."""
    return f"{micros:,.0f}" if micros > 0 else "below the noise"


def _rate(micros: float, what: str, unit: str = "") -> str:
    return f"{BUSY_SHARE * 1e6 / micros:,.0f} {what}{unit}" if micros > 0 else f"{what} at a cost below the noise"


def restart(document: dict[str, Any]) -> str:
    """What a rolling restart of everything cost its users."""
    figures = document["figures"]
    restarts = figures["restarts"]
    drained = [row for row in restarts if row.get("way") == "handed over"]
    kept = [row for row in restarts if row.get("way") == "memory kept"]
    phase = next(phase for phase in figures["phases"] if phase["name"] == "restart")
    moved = sum(row["handed"] for row in drained)
    lost = f"those of {len(figures['lost'])} prompts were lost" if figures["lost"] else "none was lost"
    return (
        f"{len(restarts)} parts restarted one after the other in {phase['seconds'] / 60:.0f} minutes, under load: "
        f"{len(drained)} shards handed {moved:,} blocks over,\n{len(kept)} kept their memory. Of "
        f"{figures['requests_during_the_restart']:,} requests meanwhile {figures['requests_that_hang']} hung; of "
        f"{figures['blocks_compared']:,} blocks that were read {len(figures['wrong'])} were wrong; of\n"
        f"{figures['corpus_blocks']:,} blocks that should survive, {lost}."
    )


def wide(document: dict[str, Any]) -> str:
    """What the simulator took for many nodes, and whether a node does more among many."""
    runs = document["figures"]["runs"]
    rows = {
        "lookup partitions": "lookup_partitions",
        "requests": "requests",
        "faults": "faults",
        "virtual seconds": "virtual_seconds",
        "turns of a node's loops, a second": "turns_per_node_and_second",
        "seconds of a core": "cpu_seconds",
        "memory of the simulator, MiB": "memory_mib",
    }
    broken = [run for run in runs if run["violation"]]
    return "\n".join(
        [
            f"{origin('wide', document)} "
            + ("No promise was broken." if not broken else f"A promise was broken: {broken[0]['violation']}"),
            "",
            "| | " + " | ".join(f"{run['nodes']:,} nodes" for run in runs) + " |",
            "|---" * (len(runs) + 1) + "|",
            *(f"| {what} | {' | '.join(f'{run[name]:,}' for run in runs)} |" for what, name in rows.items()),
        ]
    )
