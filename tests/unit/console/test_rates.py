"""Rates of counters, and what becomes of them in the page's data."""

from __future__ import annotations

import json

from kvservice.console.rates import Rates
from kvservice.console.view import FLOWS_MAX, ROWS_MAX, TEXT_CHARS_MAX, View
from tests.unit.console.pages import node, overview


def test_a_rate_is_of_the_last_seconds() -> None:
    rates = Rates(window_seconds=10.0)
    for second in range(30):
        rates.put("a", 5 * second if second < 20 else 95 + 100 * (second - 19), float(second))
    assert rates.per_second("a") == 100.0


def test_two_readings_are_kept_however_far_apart() -> None:
    rates = Rates(window_seconds=10.0)
    rates.put("a", 0, 0.0)
    rates.put("a", 600, 60.0)
    assert rates.per_second("a") == 10.0
    assert rates.per_second("unknown") == 0.0


def test_a_counter_that_falls_begins_anew() -> None:
    rates = Rates()
    for at, count in ((0.0, 1000), (1.0, 2000), (2.0, 10)):
        rates.put("a", count, at)
    assert rates.per_second("a") == 0.0
    rates.put("a", 30, 3.0)
    assert rates.per_second("a") == 20.0


def test_series_of_nodes_that_left_are_forgotten() -> None:
    view = View()
    view.take(overview(*[node(f"n{i}", {}) for i in range(50)]), 0.0)
    many = len(view._rates)
    view.take(overview(node("n0", {})), 1.0)
    assert len(view._rates) * 50 == many


def test_hit_rates_are_of_the_blocks_that_were_asked() -> None:
    view = View()
    view.take(overview(node("n0", {"asked_blocks": 0})), 0.0)
    counters = {"asked_blocks": 200, "hit_local_blocks": 100, "hit_remote_blocks": 50, "fetched_bytes": 4096}
    page, point = view.take(overview(node("n0", counters)), 2.0)
    assert (point["local_hits"], point["remote_hits"], point["pulled"]) == (0.5, 0.25, 2048)
    assert page["nodes"][0]["hit_rates"] == {"local_hits": 0.5, "remote_hits": 0.25, "tier_hits": 0.0}


def test_nothing_asked_is_no_hit_rate() -> None:
    _, point = View().take(overview(node("n0", {})), 0.0)
    assert point["local_hits"] is None


def test_a_silent_node_is_no_node_that_does_nothing() -> None:
    """Its counters are absent. When it answers again they go on from where they were."""
    view = View()
    view.take(overview(node("n0", {"acquires": 100})), 0.0)
    page, _ = view.take(overview(node("n0", {}, state="silent")), 1.0)
    assert page["nodes"][0]["rates"]["acquires"] == 0.0
    page, _ = view.take(overview(node("n0", {"acquires": 120})), 2.0)
    assert page["nodes"][0]["rates"]["acquires"] == 10.0


def test_models_and_tenants_have_the_hits_of_their_rows() -> None:
    rows = [("m", "a", 100, 40, 10, 10), ("m", "b", 100, 0, 0, 0), ("other", "a", 10, 10, 0, 0)]
    names = ("model", "tenant", "asked_blocks", "hit_local_blocks", "hit_remote_blocks", "hit_tier_blocks")
    models = [{"namespace": "", "model": name, "fingerprint": "f", "engines": 1, "nodes": []} for name in ("m", "new")]
    tenants = [{"name": "a", "used_bytes": 0, "quota_bytes": 0, "in_flight": 0, "counters": {}}]
    hits = [dict(zip(names, row, strict=True)) for row in rows]
    page, _ = View().take(overview(node("n0", {}), models=models, tenants=tenants, hits=hits), 0.0)
    assert [row["hit_rate"] for row in page["models"]] == [0.3, None]
    assert page["tenants"][0]["hit_rate"] == round(70 / 110, 4)


def test_evictions_are_counted_by_cause_over_nodes() -> None:
    view = View()
    view.take(overview(node("n0", {}, evictions={"pressure": 0, "quota": 0}), node("n1", {}, evictions={})), 0.0)
    found = overview(
        node("n0", {}, evictions={"pressure": 8, "quota": 0}),
        node("n1", {}, evictions={"pressure": 3}),
        evictions={"pressure": 11, "quota": 0},
    )
    page, point = view.take(found, 2.0)
    assert point["evicted"] == {"pressure": 4.0, "quota": 0.0}
    assert page["evictions"][0] == {"cause": "pressure", "blocks": 11, "rate": 4.0}


def test_a_page_is_bounded_whatever_the_service_has() -> None:
    long = "<img src=x onerror=alert(1)>" * 100
    flows = [{"source": f"n{i}", "target": "x", "bytes": i, "bytes_per_second": 0.0} for i in range(5000)]
    rows = [{"name": long, "used_bytes": 1, "quota_bytes": 0, "in_flight": 0, "counters": {}} for _ in range(5000)]
    nodes = [node(f"n{i}{long}", {}) for i in range(1000)]
    page, _ = View().take(overview(*nodes, flows=flows, tenants=rows, problems=[long] * 1000), 0.0)
    assert (len(page["nodes"]), len(page["flows"]), len(page["tenants"])) == (ROWS_MAX, FLOWS_MAX, ROWS_MAX)
    assert page["counts"]["nodes"] == 1000 and page["counts"]["flows"] == 5000
    assert len(page["tenants"][0]["name"]) == len(page["problems"][0]) == TEXT_CHARS_MAX
    assert page["flows"][0]["bytes"] == 4999
    assert len(json.dumps(page)) < 1 << 20


def test_a_tier_has_rates_and_its_texts_are_cut() -> None:
    tier = {"name": "disk", "detail": "x" * 1000, "written_bytes": 100, "read_bytes": 0, "counters": {"busy": 1}}
    view = View()
    view.take(overview(node("n0", {}, tiers=[tier])), 0.0)
    page, _ = view.take(overview(node("n0", {}, tiers=[{**tier, "written_bytes": 300}]), node("n1", {})), 2.0)
    (row,) = page["tiers"]
    assert (row["node_id"], row["rates"]) == ("n0", {"written_bytes": 100.0, "read_bytes": 0.0})
    assert len(row["detail"]) == TEXT_CHARS_MAX and "counters" not in row and page["counts"]["tiers"] == 1
