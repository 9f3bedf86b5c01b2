"""The outbox of a session."""

from __future__ import annotations

from kvservice.session.outbox import CALL_MAX, Outbox, Parcel
from kvservice.units import AttachmentId

ONE, OTHER = AttachmentId(1), AttachmentId(2)


def test_what_is_alike_goes_in_one_call_and_is_taken_once() -> None:
    outbox = Outbox()
    outbox.put(Parcel.SEAL, ONE, ["a"])
    outbox.put(Parcel.RELEASE, ONE, [7])
    outbox.put(Parcel.SEAL, ONE, ["b", "c"])
    outbox.put(Parcel.SEAL, OTHER, ["d"])
    assert outbox.take() == [
        (Parcel.SEAL, ONE, ["a", "b", "c"]),
        (Parcel.RELEASE, ONE, [7]),
        (Parcel.SEAL, OTHER, ["d"]),
    ]
    assert outbox.take() == []


def test_a_call_has_no_more_values_than_a_message_may_have() -> None:
    outbox = Outbox()
    outbox.put(Parcel.ABORT, ONE, range(2 * CALL_MAX + 1))
    assert [len(values) for _, _, values in outbox.take()] == [CALL_MAX, CALL_MAX, 1]
