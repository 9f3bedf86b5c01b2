"""`explain` when a record says what none of this version does."""

from __future__ import annotations

import time

import pytest

from kvservice.client.explanation import Answers, explain
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.wire.v1 import shard_pb2


class Witness:
    """One node with one record."""

    def __init__(self, record: shard_pb2.RequestRecord, *models: shard_pb2.AttachedModel) -> None:
        self.record, self.models = record, models

    def requests(self, request_id: str) -> Answers:
        return {"n": (shard_pb2.ExplainReply(records=[self.record], models=self.models), time.monotonic())}

    def histories(self, keys: bytes, age_seconds: float) -> Answers:
        return {}

    def lost(self, keys: bytes, age_seconds: float) -> Answers:
        return {}


@pytest.mark.parametrize(
    ("record", "key", "found"),
    [
        # An engine reports its prompt's length; explaining four billion blocks took all memory.
        (
            shard_pb2.RequestRecord(report=shard_pb2.RequestReport(request_id="r", prompt_blocks=(1 << 32) - 1)),
            "missed",
            KEYS_PER_REQUEST_MAX,
        ),
        (shard_pb2.RequestRecord(keys=bytes(32), promised=2, answered=True), "local", 2),  # and no run says from where
    ],
)
def test_odd_record_is_explained_as_far_as_it_goes(record: shard_pb2.RequestRecord, key: str, found: int) -> None:
    record.request_id = "r"
    assert explain(Witness(record), "r")["requests"][0]["blocks"][key] == found


def test_engines_that_cannot_be_read_end_no_explanation() -> None:
    record = shard_pb2.RequestRecord(request_id="r", keys=bytes(32), promised=2, answered=True)
    state = explain(Witness(record, shard_pb2.AttachedModel(model="m")), "r")
    assert state["requests"][0]["blocks"]["local"] == 2
    assert state["unreadable"] == ["engines of m at node n: a fingerprint has 1 to 512 fields, not 0"]
