"""The tables of what the cache finds say what the result says, and leave out what was not played."""

from __future__ import annotations

from typing import Any

from benchmarks import effect_figures


def run(label: str, capacity: int, hit_rate: float) -> dict[str, Any]:
    return {"label": label, "policy": label.partition(",")[0], "capacity": capacity, "hit_rate": hit_rate}


def study(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"runs": list(runs), "hit_rate_max": 0.4}


ALONE = study(
    *(run(policy, 100, rate) for policy, rate in (("default", 0.2), ("lru", 0.1), ("belady", 0.4))),
    *(run(policy, 1000, 0.4) for policy in ("default", "lru", "belady")),
)
DOCUMENT = {
    "commit": "0123456789ab",
    "figures": {
        "trace": ALONE,
        "made_up": {"chats": study(*(run(p, c, 0.5) for c in (1, 2, 3, 4) for p in ("default", "lru", "belady")))},
        "nodes": {
            "8": {
                "default": study(run("8 nodes, pooled, kv-aware", 1000, 0.39)),
                "lru": study(run("8 nodes, pooled, kv-aware", 1000, 0.38)),
            }
        },
    },
}


def test_one_pool_is_compared_with_the_optimum() -> None:
    table = effect_figures.one_pool(DOCUMENT)
    assert "| default | **0.200** | **0.400** |" in table
    assert "| default, of the optimum | 50% | 100% |" in table
    assert "| LRU, of the optimum | 25% | 100% |" in table
    assert "commit 0123456" in table and "40.0% of all its blocks" in table


def test_made_up_traces_have_a_small_and_a_large_cache() -> None:
    lines = effect_figures.made_up(DOCUMENT).splitlines()
    assert lines[2:] == ["| chats | 1 | 0.500 | 0.500 | 0.500 | 100% |", "|  | 4 | 0.500 | 0.500 | 0.500 | 100% |"]


def test_nodes_have_a_row_for_each_way() -> None:
    table = effect_figures.nodes(DOCUMENT)
    assert "| 8 nodes, one pool, router by holdings |  | **0.390** |" in table
    assert "| the same with LRU |  | 0.380 |" in table
    assert "| one node with all the room | 0.200 | 0.400 |" in table


def test_the_policy_has_a_row_for_each_size_and_one_for_all() -> None:
    row = {"mean": 1.25, "below_share": 0.1, "below_one_share": 0.05, "worst": -1.5, "best": 7.0}
    rates = {f"hit_rate_{name}": 0.5 for name in ("default", "lru", "s3-fifo")}
    figures = {"seeds": 3, "by_size": [{"share": 0.1, **row, **rates}], "result": {**row, **rates}}
    lines = effect_figures.policy({"commit": "0123456789ab", "figures": figures}).splitlines()
    cells = "+1.25 | 10% | 5% | -1.5 | +7.0 | 50.0 % | 50.0 % | 50.0 %"
    assert lines[-2:] == [f"| 10% | {cells} |", f"| all | {cells} |"]


def test_what_was_gained_since_the_policy_before_has_its_sign() -> None:
    before = {
        "commit": "ba9876543210",
        "figures": {effect_figures.BEFORE: study(run("reuse", 100, 0.15), run("reuse", 1000, 0.41))},
    }
    said = effect_figures.trace_before(DOCUMENT, before)
    assert "+5.0, -1.0 points" in said and "more at 1 of 2, less at 1" in said and "commit ba98765" in said


def test_nodes_are_compared_at_the_capacities_that_both_have() -> None:
    before = {
        "commit": "ba9876543210",
        "figures": {effect_figures.BEFORE: study(run("8 nodes, pooled, kv-aware", 1000, 0.39))},
    }
    said = effect_figures.nodes_before(DOCUMENT, before)
    assert (
        "- LRU: +1.0 points" in said
        and "`replay_reuse.json`): 0.0 points" in said
        and "more at 0 of 1, less at 0" in said
    )
