"""A shard needs every lookup partition, and commands say so when the list that it was given lacks one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.cli import check, doctor, status
from kvservice.cli.doctor_check import OK, PROBLEM
from kvservice.client import members
from kvservice.client.lookup_overview import LookupOverview, misplaced
from kvservice.client.members import Members
from kvservice.client.overview import Overview
from kvservice.discovery import ShardRecord
from kvservice.units import BootEpoch, NodeId
from tests.unit.cli.overviews import make_node, make_overview

ADDRESSES = ("unix:/run/lookup-0.sock", "unix:/run/lookup-1.sock")


def rows(*partitions: int, count: int = 2) -> tuple[LookupOverview, ...]:
    return tuple(LookupOverview(ADDRESSES[number], number, count, 0, 2, "") for number in partitions)


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Overview:
    """A service of two lookup partitions whose shards were given the first one."""
    seen = replace(make_overview([make_node(0), make_node(1)]), lookups=rows(0), problems=())
    monkeypatch.setattr(status, "read_overview", lambda *_: seen)
    found = Members("prod", {}, (), {}, ADDRESSES[:1], (), None)
    monkeypatch.setattr(members, "find_members", lambda *_: found)
    monkeypatch.delenv("KVSERVICE_LOOKUP", raising=False)
    return seen


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (rows(0, 1), []),
        (rows(0, count=1), []),
        (rows(0), ["is 0 of 2, and was given as 0 of 1; every shard"]),
        (rows(1, 0), ["is 1 of 2, and was given as 0 of 2", "is 0 of 2, and was given as 1 of 2"]),
        ((LookupOverview(ADDRESSES[0], 0, 0, 0, 0, "unavailable"),), []),  # it does not say what it is
    ],
)
def test_lookups_are_all_there_and_in_order(given: tuple[LookupOverview, ...], wrong: list[str]) -> None:
    found = misplaced(given)
    assert len(found) == len(wrong) and all(words in text for words, text in zip(wrong, found, strict=True))


def test_status_has_a_problem_if_shards_lack_a_lookup(one_of_two: Overview) -> None:
    assert "need --lookup of all 2" in status.collect(None).problems[0]
    assert not status.collect(None, [ADDRESSES[0]]).problems  # the option asks one partition for all the others


def test_check_has_a_problem_if_a_lookup_is_left_out(one_of_two: Overview) -> None:
    assert "need --lookup of all 2" in check.run(ADDRESSES[:1], (), 1, 0.0)[0][0]


def test_check_has_a_problem_if_a_lookup_knows_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = LookupOverview(ADDRESSES[0], 0, 1, 0, 0, "")
    seen = replace(make_overview([make_node(0), make_node(1, state="silent")]), lookups=(partition,), problems=())
    monkeypatch.setattr(status, "read_overview", lambda *_: seen)
    assert "knows 0 nodes, but 1 cache shard answered" in check.run(ADDRESSES[:1], (), 0, 0.0)[0][0]


def test_doctor_has_a_problem_if_shards_lack_a_lookup(one_of_two: Overview, monkeypatch: pytest.MonkeyPatch) -> None:
    record = ShardRecord("prod", NodeId("a"), "/run/a.sock", "unix:/run/a.sock", 1, BootEpoch(1), ADDRESSES[:1])
    monkeypatch.setattr("kvservice.discovery.find_shards", lambda **_: [record])
    found = doctor.guarded(doctor.service_parts)
    assert [row.status for row in found if row.name == "lookup of prod"] == [OK, PROBLEM]
