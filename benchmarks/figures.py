"""Writes the figures of the pages in PAGES from the committed results.

    python -m benchmarks.figures

Measures nothing. What stands between `<!-- figures: NAME -->` and `<!-- /figures -->` is replaced by what BLOCKS makes
of benchmarks/results/*.json. A result of a tree with uncommitted changes cannot be repeated, so it is not cited: its
place says which command measures it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tier_figures
from benchmarks.peers.__main__ import bandwidth_rows, lookup_rows
from benchmarks.report import RESULTS, ROOT
from benchmarks.sharing_table import sharing_tables
from benchmarks.summary import LOOKUP_GOALS_MS

_NAMES = ("comparison.md", "performance.md", "performance-goals.md", "growth.md", "blend.md", "disk-worth.md")
_HOWTO = ("traces.md", "monitor.md", "share-engines.md")
PAGES = tuple(ROOT / "docs" / name for name in (*_NAMES, "codecs.md", *(f"howto/{name}" for name in _HOWTO)))
AGAIN = "to be measured again"
SIZES = {65536: "64 KiB", 737280: "720 KiB", 2097152: "2 MiB"}
MORE_IN_FLIGHT = "7745369e8af1"  # of this commit's peers.json: 96 MiB of a pull were in flight, 24 may be now
_BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
Figures = dict[str, Any]


class Unclean(Exception):
    """A result of a tree with uncommitted changes, which nobody can check out again."""

    def __init__(self, command: str) -> None:
        super().__init__(f"{AGAIN}: `{command}`")


class Results:
    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder

    def document(self, name: str) -> Figures:
        """The result, if it may be cited. Raises Unclean if not, or if there is none yet."""
        path = self._folder / f"{name}.json"
        if not path.exists():
            raise Unclean(f"python -m benchmarks.{name}")
        found: Figures = json.loads(path.read_text())
        if not is_clean(found):
            raise Unclean(_command(name, found))
        return found

    def figures(self, name: str) -> Figures:
        found: Figures = self.document(name)["figures"]
        return found


def _command(name: str, document: Figures) -> str:
    """The command that measures this result again."""
    command = re.sub(r" --out \S+", "", document["command"])
    return command if name == document["benchmark"] else f"{command} --out benchmarks/results/{name}.json"


def is_clean(document: Figures) -> bool:
    return re.fullmatch(r"[0-9a-f]{12}", document["commit"]) is not None


def peers(results: Results) -> str:
    document = results.document("peers")
    rates = {(what, who): rate for what, who, size, rate in bandwidth_rows(document["figures"]) if size == 2097152}
    times = {who: p50 for who, keys, p50, _ in lookup_rows(document["figures"]) if keys == 512}
    read, tcp = "read, same node", "read over TCP"
    now = ""
    if document["commit"] == MORE_IN_FLIGHT:
        alone = results.figures("transfer_bandwidth")["by_ucx_transport"]["tcp"]["2097152"]["pull"]["gb_per_second"]
        now = f" ({alone:.2f} by itself, with as much in flight as is allowed now)"
    text = (
        f"Measured beside each other in one run (`make bench-peers`, 2 cores of a virtual machine, commit "
        f"{document['commit'][:7]}; [all of it](performance.md)):\na lookup of 512 keys from another "
        f"process takes "
        f"{times['kvservice, mirror of the node']:.3f} ms, Mooncake's `batch_is_exist` "
        f"{times['Mooncake batch_is_exist']:.1f};\na block of 2 MiB is read on its node at "
        f"{rates[read, 'kvservice']:.2f} GB/s with sampled verification, where memcpy reaches "
        f"{rates[read, 'memcpy']:.2f}, "
        f"Ray's object store {rates[read, 'Ray object store']:.2f}\nand Mooncake "
        f"{rates[read, 'Mooncake Store, own segment']:.2f}; over TCP, verified, at "
        f"{rates[tcp, 'kvservice, all verified']:.2f} GB/s{now}, where Mooncake reaches\n"
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
    "Redis": "Redis",
    "Mooncake Store, own segment": "Mooncake Store, own segment",
    "Ray object store": "Ray object store",
    "Mooncake Store": "Mooncake Store",
    "raw NIXL": "raw NIXL",
}
DEFAULTS = {
    ("read, same node", "kvservice"): "kvservice, `verify_load` sampled (the default)",
    ("write, same node", "kvservice"): "kvservice, what the engine waits for",
    ("write, same node", "memcpy"): "memcpy into fresh memory",
    ("read over TCP", "Mooncake Store"): "Mooncake Store, not verified",
}


def bandwidth(results: Results) -> str:
    by_row: dict[tuple[str, str], dict[int, float]] = {}
    for what, who, size, rate in bandwidth_rows(results.figures("peers")):
        by_row.setdefault((what, who), {})[size] = rate
    lines = ["| GB/s | " + " | ".join(SIZES.values()) + " |", "|---|" + "---|" * len(SIZES)]
    for section in ("read, same node", "write, same node", "read over TCP"):
        for number, (what, who) in enumerate([key for key in by_row if key[0] == section]):
            name = DEFAULTS.get((what, who), NAMES[who])
            head = f"**{section}**: {name}" if number == 0 else name
            lines.append(f"| {head} | " + " | ".join(f"{by_row[what, who][size]:.2f}" for size in SIZES) + " |")
    return "\n".join(lines)


def in_flight(results: Results) -> str:
    if results.document("peers")["commit"] != MORE_IN_FLIGHT:
        return ""
    alone = results.figures("transfer_bandwidth")["by_ucx_transport"]["tcp"]
    rates = ", ".join(f"{alone[str(size)]['pull']['gb_per_second']:.2f}" for size in SIZES)
    return (
        "The rows over TCP were measured with up to 96 MiB of a pull in flight. 24 are the limit now, with which a run "
        f"by itself gave {rates} GB/s\n(`transfer_bandwidth.json`)."
    )


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
        "Real vLLM, SmolLM2-135M, bfloat16, one request at a time, two nodes of one machine; seconds, medians of three",
        "(`first_token.json`).",
        "",
        "| prompt tokens | computed | computed, no connector | own cache | this node's pool | other node's pool |",
    ]
    lines.append("|---|" + "---|" * len(ways))
    for tokens, found in results.figures("first_token")["seconds_by_prompt_tokens"].items():
        lines.append(f"| {int(tokens):,} | " + " | ".join(f"{found[way]:.3g}" for way in ways) + " |")
    return "\n".join(lines)


# -- goals: (what, goal, (seen, met), where), the middle one asked for, since its result may be unclean ----

Seen = tuple[str, str]
Row = tuple[str, str, Callable[[Results], Seen], str]
ONE_AND_TWO = {"1 partition": "one lookup partition", "2 partitions": "two"}


def _lookup(name: str) -> Callable[[Results], Seen]:
    """The figures for both numbers of lookup partitions. A goal is met if both meet it."""

    def seen(results: Results) -> Seen:
        texts, missed = [], []
        for key, shards in ONE_AND_TWO.items():
            found = {keys: results.figures(name)[key]["mirror"]["one_reader"][keys] for keys in LOOKUP_GOALS_MS}
            p50 = {keys: latency["p50_us"] / 1e3 for keys, latency in found.items()}
            p99 = [latency["p99_us"] / 1e3 for latency in found.values()]
            texts.append(f"{shards}: {_list(list(p50.values()))} ms; p99 {_list(p99)}")
            missed += [f"{int(k):,} with {shards}" for k, goal in LOOKUP_GOALS_MS.items() if p50[k] > goal]
        return "; ".join(texts), f"not {', '.join(missed)}" if missed else "yes"

    return seen


def _busy(results: Results) -> Seen:
    texts = []
    for key, shards in ONE_AND_TWO.items():
        found = results.figures("lookup_latency")[key]["mirror"]["eight_readers"]
        worst = max(found[keys]["p99_us"] for keys in LOOKUP_GOALS_MS) / 1e3
        texts.append(
            f"{shards}: {_list([found[keys]['p50_us'] / 1e3 for keys in LOOKUP_GOALS_MS])} ms, p99 up to {worst:.0f}"
        )
    return f"{'; '.join(texts)}: eight processes, two cores", "–"


def _of_both(
    name: str, read: Callable[[Figures], float], unit: str, enough: Callable[[float], bool]
) -> Callable[[Results], Seen]:
    def seen(results: Results) -> Seen:
        found = {shards: read(results.figures(name)[key]) for key, shards in ONE_AND_TWO.items()}
        texts = [f"{shards}: {value:,.3g} {unit}" for shards, value in found.items()]
        return "; ".join(texts), "yes" if all(enough(value) for value in found.values()) else "no"

    return seen


def _ratios(name: str, way: str, goal: float) -> Callable[[Results], Seen]:
    def seen(results: Results) -> Seen:
        figures = results.figures(name)
        found = {size: ways[way]["ratio"] for size, ways in figures.items() if isinstance(ways, dict) and way in ways}
        met = [size for size, ratio in found.items() if ratio >= goal]
        said = "yes" if len(met) == len(found) else f"at {', '.join(met)}" if met else "no"
        return f"{' / '.join(f'{ratio:.2f}' for ratio in found.values())} ({', '.join(found)})", said if goal else "–"

    return seen


def _pulls(link: str) -> Callable[[Results], Seen]:
    def seen(results: Results) -> Seen:
        found = results.figures("transfer_bandwidth")["by_ucx_transport"]
        ratios = [found[link][str(size)]["pull"]["ratio"] for size in SIZES]
        return " / ".join(f"{ratio:.2f}" for ratio in ratios), "yes" if min(ratios) >= 0.9 else "no"

    return seen


def _cold(results: Results) -> Seen:
    found = results.figures("cold_path")["throughput"]
    ratio, low, high = found["with_to_without_p50"], found["noise_p25"], found["noise_p75"]
    return f"{ratio:.3f}; noise {low:.2f} to {high:.2f}", "yes" if ratio >= 0.98 else "no"


def _flood(results: Results) -> Seen:
    found = results.figures("reliability_flood")
    p99, p50 = (found[f"its {name} to that without the flood"]["figure"] for name in ("p99", "p50"))
    return f"{p99:.1f} (p50: {p50:.1f})", "yes" if p99 <= 1.2 else "no"


def _tier(name: str, read: Callable[[Figures], tuple[str, bool]]) -> Callable[[Results], Seen]:
    def seen(results: Results) -> Seen:
        said, met = read(results.figures(name))
        return said, "yes" if met else "no"

    return seen


def _startup(read: Callable[[Figures], str]) -> Callable[[Results], Seen]:
    return lambda results: (read(results.figures("startup")), "–")


GOALS: Sequence[Row] = (
    (
        "lookup, 1 / 64 / 512 / 2,048 keys, 1 M blocks known, p50",
        "0.05 / 0.1 / 0.1 / 0.25 ms",
        _lookup("lookup_latency"),
        "lookup_latency",
    ),
    ("the same, 10 M known", "the same", _lookup("lookup_latency_10m"), "lookup_latency_10m"),
    (
        "the same, 10 M known, huge pages in /dev/shm",
        "the same",
        _lookup("lookup_latency_10m_huge_pages"),
        "lookup_latency_10m_huge_pages",
    ),
    ("the same, eight readers at once, 1 M, p50", "–", _busy, "lookup_latency"),
    (
        "mirror, bytes a block, 1 M",
        "64",
        _of_both("lookup_latency", lambda f: f["mirror"]["bytes_per_key"], "bytes", lambda value: value <= 64),
        "lookup_latency",
    ),
    (
        "mirror fed, keys a second of a core, 1 M",
        "0.3 M",
        _of_both(
            "lookup_latency", lambda f: f["mirror"]["fed_keys_per_cpu_second"] / 1e6, "M", lambda value: value >= 0.3
        ),
        "lookup_latency",
    ),
    (
        "gRPC, keys a second of a lookup partition's core, 1 M",
        "4 M",
        _of_both("lookup_latency", lambda f: f["resolved_keys_per_cpu_second"] / 1e6, "M", lambda value: value >= 4),
        "lookup_latency",
    ),
    (
        "load, sampled verification, to memcpy",
        "0.9",
        _ratios("local_bandwidth", "load, verify_load sampled", 0.9),
        "local_bandwidth",
    ),
    ("the same, every block verified", "–", _ratios("local_bandwidth", "load, verify_load full", 0), "local_bandwidth"),
    ("store, what the engine waits for, to memcpy", "0.9", _ratios("local_bandwidth", "store", 0.9), "local_bandwidth"),
    (
        "pull, verified, to raw NIXL over shared memory: 64 KiB / 720 KiB / 2 MiB",
        "0.9",
        _pulls("shared memory (UCX's choice)"),
        "transfer_bandwidth",
    ),
    ("the same over TCP", "0.9", _pulls("tcp"), "transfer_bandwidth"),
    ("throughput without any reuse, to that without the connector", "0.98", _cold, "cold_path"),
    ("a tenant's p99 under another's flood, to that without", "1.2", _flood, "reliability_flood"),
    (
        "disk tier, write / read of 2 MiB to plain calls",
        "0.9",
        _tier("tier_disk", tier_figures.disk_goal),
        "tier_disk",
    ),
    (
        "object tier, put / get of an S3 API to bare obstore",
        "0.9",
        _tier("tier_objects", tier_figures.objects_goal),
        "tier_objects",
    ),
    (
        "p99 of reserve, seal and acquire with a busy disk tier, to that without",
        "1.1",
        _tier("tier_stall", tier_figures.stall_goal),
        "tier_stall",
    ),
    (
        "segment ready, per 100 GB, every page reserved",
        "–",
        _startup(lambda f: f"{f['segment_seconds_per_100_gb']:.0f} s"),
        "startup",
    ),
    (
        "shard takes up what an earlier one left, per GiB, every digest verified",
        "–",
        _startup(lambda f: f"{f['adoption_seconds_per_gib']:.1f} s"),
        "startup",
    ),
    (
        "engine attaches, p50 / p99",
        "–",
        _startup(lambda f: f"{f['attach_p50_ms']:.1f} / {f['attach_p99_ms']:.0f} ms"),
        "startup",
    ),
)


def goals(results: Results) -> str:
    lines = ["| what | goal | seen | met | where |", "|---|---|---|---|---|"]
    for what, goal, read, where in GOALS:
        try:
            seen, met = read(results)
        except Unclean as error:
            seen, met = str(error), "–"
        lines.append(f"| {what} | {goal} | {seen} | {met} | `{where}.json` |")
    return "\n".join(lines)


def _row(what: str, cells: Iterable[str]) -> str:
    return f"| {what} | {' | '.join(cells)} |"


def growth_units(results: Results) -> str:
    """What one key, call and announcement costs, by the number of nodes."""
    document = results.document("growth")
    costs = document["figures"]["unit_costs_in_seconds_of_a_core_and_bytes"]
    nodes = sorted(costs["bytes_per_key"], key=int)

    def micros(name: str) -> list[str]:
        return [f"{costs[name][count] * 1e6:.2f}" for count in nodes]

    return "\n".join(
        [
            f"Measured at commit {document['commit'][:7]} (`growth.json`).\n",
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
            f"key (gRPC in Python, 32 callers\nat once), a sign of life {costs['heartbeat_call'] * 1e3:.2f} ms.",
        ]
    )


def growth_scales(results: Results) -> str:
    """The load of one lookup partition at each scale, and what gives way first."""
    scales = results.figures("growth")["scales"][1:]

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
            _row("cores of one: signs of life / updates / lookups", each(cores)),
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
            _row("the mirror on every node: its keys in memory, MB", megabytes("mirror_bytes_of_a_node")),
            _row(
                "changes a second that it has to apply",
                each(lambda s: f"{s['mirror_updates_per_second_of_a_node']:,}"),
            ),
            _row(
                "sent to all mirrors by a lookup partition, MB/s",
                megabytes("mirrors_bytes_per_second_of_a_lookup_partition"),
            ),
            _row("**gives way first**", each(lambda s: "; ".join(s["gives_way"]) or "nothing")),
        ]
    )


def _megabytes(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}" if value >= 0.1 else f"{value:.3f}"


def _list(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


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


BLOCKS: dict[str, Callable[[Results], str]] = {
    "peers": peers,
    "bandwidth": bandwidth,
    "in-flight": in_flight,
    "lookups": lookups,
    "handoff": handoff,
    "goals": goals,
    "first-token": first_token,
    "growth-units": growth_units,
    "growth-scales": growth_scales,
    "traces-cost": traces_cost,
    "histograms-cost": histograms_cost,
    "blend": blend,
    "disk-worth": lambda results: tier_figures.disk_worth(results.figures("disk_worth")),
    "sharing": lambda results: sharing_tables(results.figures("sharing")),
    "tier-disk": lambda results: tier_figures.disk(results.figures("tier_disk")),
    "tier-objects": lambda results: tier_figures.objects(results.figures("tier_objects")),
    "codecs": lambda results: tier_figures.codecs(results.figures("codecs")),
    "tier-stall": lambda results: tier_figures.stall(results.figures("tier_stall")),
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


if __name__ == "__main__":
    main()
