"""Writes the figures of the pages in PAGES, and the table of all results, from the committed results.

    python -m benchmarks.figures

Measures nothing. What stands between `<!-- figures: NAME -->` and `<!-- /figures -->` is replaced by what BLOCKS makes
of benchmarks/results/*.json. A result of a tree with uncommitted changes cannot be repeated, so it is not cited: its
place says which command measures it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from benchmarks import effect_figures, scale_figures, summary, tier_figures
from benchmarks.committed import Figures, Results, Unclean, origin, seen_on
from benchmarks.goals import NO_FIGURE, judged, read
from benchmarks.gpu import tables as gpu_tables
from benchmarks.memory import markdown as memory_table
from benchmarks.peers.__main__ import bandwidth_rows, lookup_rows
from benchmarks.report import RESULTS, ROOT
from benchmarks.sharing_table import sharing_tables
from kvservice.units import KiB

_NAMES = (
    *("comparison.md", "performance.md", "performance-goals.md", "growth.md", "blend.md", "disk-worth.md"),
    *("effectiveness.md", "codecs.md", "reliability.md", "serve.md", "gpu-campaign.md"),
)
_HOWTO = ("traces.md", "monitor.md", "share-engines.md", "size-the-pool.md", "memory-nodes.md")
PAGES = tuple(ROOT / "docs" / name for name in (*_NAMES, *(f"howto/{name}" for name in _HOWTO)))
SIZES = {65536: "64 KiB", 737280: "720 KiB", 2097152: "2 MiB"}
_BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def peers(results: Results) -> str:
    document = results.document("peers")
    rates = {(what, who): rate for what, who, size, rate in bandwidth_rows(document["figures"]) if size == 2097152}
    times = {who: p50 for who, keys, p50, _ in lookup_rows(document["figures"]) if keys == 512}
    read, tcp = "read, same node", "read over TCP"
    text = (
        f"Measured beside each other in one run (`make bench-peers`, commit {document['commit'][:7]}, "
        f"{seen_on(document)}; [all of it](performance.md)):\na lookup of 512 keys from another "
        f"process takes "
        f"{times['kvservice, mirror of the node']:.3f} ms, Mooncake's `batch_is_exist` "
        f"{times['Mooncake batch_is_exist']:.1f};\na block of 2 MiB is read on its node at "
        f"{rates[read, 'kvservice']:.2f} GB/s with every byte verified, where memcpy reaches "
        f"{rates[read, 'memcpy']:.2f}, "
        f"Ray's object store {rates[read, 'Ray object store']:.2f}\nand Mooncake "
        f"{rates[read, 'Mooncake Store, own segment']:.2f}; over TCP, verified, at "
        f"{rates[tcp, 'kvservice, all verified']:.2f} GB/s, where Mooncake reaches\n"
        f"{rates[tcp, 'Mooncake Store']:.2f} unverified."
    )
    try:
        longest = max(results.figures("first_token")["seconds_by_prompt_tokens"].items(), key=lambda item: int(item[0]))
    except Unclean:
        return text
    tokens, ways = longest
    return (
        f"{text} A prompt of {int(tokens):,} tokens that another node has computed has its first token after "
        f"{ways['other node']:.2f} s instead of {ways['computed']:.0f} s."
    )


NAMES = {
    "memcpy": "memcpy",
    "kvservice": "kvservice",
    "kvservice, all verified": "kvservice, every block verified",
    "kvservice, until sealed": "kvservice, until sealed (digests, in the shard)",
    "KVCR": "NVIDIA KVCR, in one process",
    "LMCache server": "LMCache server",
    "Redis": "Redis",
    "Mooncake Store, own segment": "Mooncake Store, own segment",
    "Ray object store": "Ray object store",
    "Mooncake Store": "Mooncake Store",
    "raw NIXL": "raw NIXL",
}
DEFAULTS = {
    ("read, same node", "kvservice"): "kvservice, every block verified",
    ("write, same node", "kvservice"): "kvservice, what the engine waits for",
    ("write, same node", "memcpy"): "memcpy into fresh memory",
    ("read over TCP", "Mooncake Store"): "Mooncake Store, not verified",
    ("read of a peer, same machine", "raw NIXL"): "raw NIXL, by shared memory",
    ("read of a peer, same machine", "Mooncake Store"): "Mooncake Store, over TCP, not verified",
}


def bandwidth(results: Results) -> str:
    by_row: dict[tuple[str, str], dict[int, float]] = {}
    for what, who, size, rate in bandwidth_rows(results.figures("peers")):
        by_row.setdefault((what, who), {})[size] = rate
    lines = ["| GB/s | " + " | ".join(SIZES.values()) + " |", "|---|" + "---|" * len(SIZES)]
    for section in ("read, same node", "write, same node", "read of a peer, same machine", "read over TCP"):
        for number, (what, who) in enumerate([key for key in by_row if key[0] == section]):
            name = DEFAULTS.get((what, who), NAMES[who])
            head = f"**{section}**: {name}" if number == 0 else name
            lines.append(f"| {head} | " + " | ".join(f"{by_row[what, who][size]:.2f}" for size in SIZES) + " |")
    return "\n".join(lines)


def verification(results: Results) -> str:
    """What it costs a load to check every block, by the loads that check none in the same run."""
    document = results.document("local_bandwidth")
    found = [document["figures"][f"{size // KiB} KiB"] for size in SIZES]
    rates = [[ways[f"load, verify_load {how}"]["gb_per_second"] for how in ("sampled", "off")] for ways in found]
    shares = ", ".join(
        f"{checked / unchecked:.2f} at {size}" for size, (checked, unchecked) in zip(SIZES.values(), rates, strict=True)
    )
    return f"- of the bandwidth of loads that check none: {shares}. {origin('local_bandwidth', document)}"


def lookups(results: Results) -> str:
    by_who: dict[str, dict[int, str]] = {}
    for who, keys, p50, p99 in lookup_rows(results.figures("peers")):
        by_who.setdefault(who, {})[keys] = f"{_ms(p50)} / {_ms(p99)}"
    counts = list(next(iter(by_who.values())))
    head = " | ".join(f"{count:,}" for count in counts)
    lines = [f"| lookup from another process, p50 / p99 in ms, 100,000 keys known | {head} |"]
    lines.append("|---|" + "---|" * len(counts))
    lines += [f"| {who} | " + " | ".join(cells[count] for count in counts) + " |" for who, cells in by_who.items()]
    return "\n".join(lines)


def handoff(results: Results) -> str:
    rows = results.figures("pd_handoff")["rows"]
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(f"{row['system']}, {row['way']}", []).append(f"{1e3 * row['handoff_seconds']:.0f} ms")
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    lines = [
        "| decode's first token after a prefill, less one step | " + " | ".join(f"{t:,} tokens" for t in tokens) + " |"
    ]
    lines.append("|---|" + "---|" * len(tokens))
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in found.items()]
    return "\n".join(lines)


def first_token(results: Results) -> str:
    ways = ("computed", "computed, without the connector", "own cache", "this node", "other node")
    lines = [
        "Real vLLM, SmolLM2-135M, bfloat16, one request at a time, two nodes of a machine; seconds, medians of three.",
        "",
        "| prompt tokens | computed | computed, no connector | own cache | this node's pool | other node's pool |",
    ]
    lines.append("|---|" + "---|" * len(ways))
    for tokens, found in results.figures("first_token")["seconds_by_prompt_tokens"].items():
        lines.append(f"| {int(tokens):,} | " + " | ".join(f"{found[way]:.3g}" for way in ways) + " |")
    return "\n".join(lines)


def remote_hit(results: Results) -> str:
    best = results.figures("remote_hit")["best"]
    return (
        "In `make demo`, the first hit between two new nodes and the same prompt from the node's own pool:\n"
        f"{best['remote_seconds']:.2f} s and {best['warm_seconds']:.2f} s until the first token, the best of "
        f"{len(results.figures('remote_hit')['rounds'])} runs; about 185 MiB cross by NIXL over TCP."
    )


def goals(results: Results) -> str:
    lines = ["| goal | bound | seen | result |", "|---|---|---|---|"]
    for goal, seen, met in judged(read(), results):
        shown = f"**{seen}, missed**" if met == "no" else seen
        of = "" if met == NO_FIGURE else f", {seen_on(results.document(goal.result))}"
        lines.append(f"| {goal.what} | {goal.bound} | {shown} | `{goal.result}.json`{of} |")
    return "\n".join(lines)


def goals_missed(results: Results) -> str:
    """Each goal that is missed, with what was tried."""
    missed = [(goal, seen) for goal, seen, met in judged(read(), results) if met == "no"]
    return "\n".join(f"- **{goal.what}** ({goal.bound}): {seen}. {goal.tried}" for goal, seen in missed)


def _row(what: str, cells: Iterable[str]) -> str:
    return f"| {what} | {' | '.join(cells)} |"


def serve_demo(results: Results) -> str:
    apps = results.figures("serve_demo")["apps"]
    lines = [
        "| app | prompt tokens hit | computed | first token of later turns, p50 | p90 |",
        "|---|---|---|---|---|",
    ]
    for name, found in apps.items():
        times = [f"{found[f'first_token_{which}_seconds']:.2f} s" for which in ("p50", "p90")]
        lines.append(_row(name, [f"{found['hit_rate']:.1%}", f"{found['recomputed_tokens']:,}", *times]))
    return "\n".join(lines)


def growth_units(results: Results) -> str:
    """What one key, call and announcement costs, by the number of nodes."""
    document = results.document("growth")
    costs = document["figures"]["unit_costs_in_seconds_of_a_core_and_bytes"]
    nodes = sorted(costs["bytes_per_key"], key=int)

    def micros(name: str) -> list[str]:
        return [f"{costs[name][count] * 1e6:.2f}" for count in nodes]

    return "\n".join(
        [
            f"{origin('growth', document)}\n",
            f"| | {nodes[0]} nodes | {' | '.join(f'{int(count):,}' for count in nodes[1:])} |",
            "|---" * (len(nodes) + 1) + "|",
            _row("directory, bytes a key", [f"{costs['bytes_per_key'][count]:.0f}" for count in nodes]),
            _row("key announced, in announcements of 64, µs of a core", micros("add_per_key")),
            _row("key announced again with all of its node, µs", micros("rebuild_per_key")),
            _row("key looked up, µs", micros("resolve_per_key")),
            _row(
                "first lookup of 512 keys after a node came or went, ms",
                [f"{costs['first_resolve'][count] * 1e3:.1f}" for count in nodes],
            ),
            f"\nA call to a lookup partition costs it {costs['resolve_call'] * 1e3:.2f} ms of a core before its first "
            f"key (gRPC in Python, 32 callers\nat once), and a heartbeat {costs['heartbeat_call'] * 1e3:.2f} ms.",
        ]
    )


def growth_scales(results: Results) -> str:
    """The load of one lookup partition at each scale, and what gives way first."""
    scales = results.figures("growth")["scales"][1:]
    reckoned = scales[0]["mirror_bytes_of_a_node"] // scales[0]["blocks"]
    mirror = results.figures("lookup_latency")["1 partition"]["mirror"]

    def each(cell: Callable[[Figures], str]) -> list[str]:
        return [cell(scale) for scale in scales]

    def cores(scale: Figures) -> str:
        return " / ".join(f"{value:.2f}" for value in scale["cores_of_a_lookup_partition"].values())

    def megabytes(name: str) -> list[str]:
        return [_megabytes(scale[name] / 1e6) for scale in scales]

    return "\n".join(
        [
            _row("", each(lambda s: f"{s['nodes']:,} nodes, {s['blocks'] // 1_000_000:,} M blocks")),
            "|---" * (len(scales) + 1) + "|",
            _row("lookup partitions", each(lambda s: str(s["lookup_partitions"]))),
            _row("cores of one: heartbeats / updates / lookups", each(cores)),
            _row("its keys in memory, MB", megabytes("directory_bytes_of_a_lookup_partition")),
            _row("announced to it, MB/s", megabytes("announced_bytes_per_second_of_a_lookup_partition")),
            _row("calls of one prompt's lookup, without a mirror", each(lambda s: f"{s['fan_out']:.1f}")),
            _row(
                "lookups a second and core over gRPC, all partitions together",
                each(lambda s: f"{s['lookups_per_second_and_core']:,}"),
            ),
            _row(
                "it restarts: keys come back after, s of its core",
                each(lambda s: f"{s['rebuild_seconds_of_a_lookup_partition']:.1f}"),
            ),
            _row(
                "a shard announces all it has, s of its core",
                each(lambda s: f"{s['full_announcement_seconds_of_a_node']:.2f}"),
            ),
            _row(
                f"the mirror on every node: its keys in memory, at {reckoned} bytes each, MB",
                megabytes("mirror_bytes_of_a_node"),
            ),
            _row(
                "changes a second that it has to apply",
                each(lambda s: f"{s['mirror_updates_per_second_of_a_node']:,}"),
            ),
            _row(
                "sent to all mirrors by a lookup partition, MB/s",
                megabytes("mirrors_bytes_per_second_of_a_lookup_partition"),
            ),
            _row("**gives way first**", each(lambda s: _today("; ".join(s["gives_way"])) or "nothing")),
            f"\nWith a million keys a mirror was measured at {mirror['bytes_per_key']:.1f} bytes a key "
            "(`lookup_latency.json`).",
        ]
    )


def _today(text: str) -> str:
    """The words of a result that was written before they changed."""
    return text.replace("signs of life", "heartbeats").replace("subscribers", "watchers")


def _megabytes(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}" if value >= 0.1 else f"{value:.3f}"


def _nats(value: float) -> str:
    return f"{value:.3f}" if value else "0"


def traces_cost(results: Results) -> str:
    document = results.document("observing")
    calls, acquire = document["figures"]["calls_us"], document["figures"]["acquire_of_128_blocks"]
    off, on = acquire["off"]["p50_us"], acquire["on"]["p50_us"]
    return (
        f"Off, a span takes {calls['traces off: a span']:.1f} µs and the metadata of a call "
        f"{calls['traces off: metadata of a call']:.2f} µs; an acquire of {off:,.0f} µs has three of them.\n"
        f"On, an acquire that is traced takes {(on - off) / 1000:.1f} ms more (medians)."
    )


def histograms_cost(results: Results) -> str:
    document = results.document("observing")
    calls = document["figures"]["calls_us"]
    off = document["figures"]["acquire_of_128_blocks"]["off"]["p50_us"]
    return (
        f"A histogram takes {calls['histogram']:.1f} µs, with an exemplar {calls['histogram with an exemplar']:.1f}. "
        f"An acquire of 128 blocks that are on the node takes\n{off:,.0f} µs (median)."
    )


def blend(results: Results) -> str:
    """A table and a picture by ratio; nothing while nobody has measured."""
    try:
        document = results.document("blend")
    except FileNotFoundError:
        return ""
    found = document["figures"]
    answer = f"tokens of the answer before the first other one, of {found['answer_tokens']}"
    heads = (
        "KL, mean",
        "worst question",
        "most likely token equal",
        answer,
        "tokens computed",
        "of full prefill's time",
    )
    rows = {f"{100 * float(ratio):g} %": row for ratio, row in found["by_ratio"].items()}
    lines = [
        f"{found['model']}, {found['dtype']}: {found['documents']} sections of the demo's handbook, "
        f"{found['prompt_tokens']:,} tokens with what is around them;",
        f"{found['questions']} questions with an order each; check layer {', '.join(map(str, found['check_layers']))}. "
        f"A full prefill took {found['full_prefill_seconds']:.1f} s (commit {document['commit'][:7]}).",
        "",
        f"| computed again | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for name, row in {"0 %, keys not rotated": found["keys_not_rotated"], **rows}.items():
        shares = [f"{100 * row[key]:.0f} %" for key in ("top1_share", "computed_share", "of_full_prefill")]
        cells = [_nats(row["kl_mean"]), _nats(row["kl_worst_question"]), shares[0], f"{row['equal_answer_tokens']:.1f}"]
        lines.append(_row(name, [*cells, *shares[1:]]))
    said = "KL and time by the share of the cached tokens that is computed again"
    lines += ["", f"![{said}](img/blend-light.svg#only-light)", f"![{said}](img/blend-dark.svg#only-dark)"]
    return "\n".join(lines)


def dated(name: str, make: Callable[[Results], str]) -> Callable[[Results], str]:
    """With the commit, the day and the processor of the result that it shows."""
    return lambda results: f"{origin(name, results.document(name))}\n\n{make(results)}"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "peers": peers,
    "bandwidth": dated("peers", bandwidth),
    "verification": verification,
    "lookups": dated("peers", lookups),
    "handoff": dated("pd_handoff", handoff),
    "remote-hit": dated("remote_hit", remote_hit),
    "spill": dated("spill", lambda results: tier_figures.spill(results.figures("spill"))),
    "serve-demo": dated("serve_demo", serve_demo),
    "goals": goals,
    "goals-missed": goals_missed,
    "first-token": dated("first_token", first_token),
    "growth-units": growth_units,
    "growth-scales": growth_scales,
    "scale-costs": lambda results: scale_figures.costs(results.document("scale")),
    "scale-restart": lambda results: scale_figures.restart(results.document("scale")),
    "wide": lambda results: scale_figures.wide(results.document("wide")),
    "effect-trace": lambda results: effect_figures.one_pool(results.document("replay")),
    "effect-made-up": lambda results: effect_figures.made_up(results.document("replay")),
    "effect-nodes": lambda results: effect_figures.nodes(results.document("replay")),
    "effect-trace-before": lambda results: effect_figures.trace_before(
        results.document("replay"), results.document("replay_reuse")
    ),
    "effect-before": lambda results: effect_figures.nodes_before(
        results.document("replay"), results.document("replay_reuse")
    ),
    "effect-policy": lambda results: effect_figures.policy(results.document("policy")),
    "traces-cost": dated("observing", traces_cost),
    "histograms-cost": dated("observing", histograms_cost),
    "blend": blend,
    "disk-worth": dated("disk_worth", lambda results: tier_figures.disk_worth(results.figures("disk_worth"))),
    "sharing": sharing_tables,
    "tier-disk": dated("tier_disk", lambda results: tier_figures.disk(results.figures("tier_disk"))),
    "tier-objects": dated("tier_objects", lambda results: tier_figures.objects(results.figures("tier_objects"))),
    "codecs": dated("codecs", lambda results: tier_figures.codecs(results.figures("codecs"))),
    "memory": dated("memory", lambda results: memory_table(results.figures("memory"))),
    "gpu-copies": dated("gpu/part1", lambda results: gpu_tables.copies(results.figures("gpu/part1"))),
    "gpu-interference": dated("gpu/part1", lambda results: gpu_tables.interference(results.figures("gpu/part1"))),
    "gpu-first-token": dated("gpu/part2", lambda results: gpu_tables.first_token(results.figures("gpu/part2"))),
    "tier-stall": dated("tier_stall", lambda results: tier_figures.stall(results.figures("tier_stall"))),
}


def rendered(text: str, results: Results) -> str:
    """The text of the page, with every block written again from the results."""

    def block(match: re.Match[str]) -> str:
        try:
            made = BLOCKS[match[2]](results)
        except Unclean as error:
            made = f"{str(error)[0].upper()}{str(error)[1:]}."
        return f"{match[1]}{made}\n{match[3]}"

    return _BLOCK.sub(block, text)


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        new = rendered(text, Results())
        if new != text:
            page.write_text(new)
            print(f"wrote {page.relative_to(ROOT)}")
    summary.write(RESULTS)


if __name__ == "__main__":
    main()
