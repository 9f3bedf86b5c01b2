"""Frames: any stream of bytes, in any pieces, is cut alike or refused at once; errors travel whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.errors import (
    FingerprintMismatch,
    InvalidRequest,
    KVServiceError,
    Unavailable,
    VersionMismatch,
    another_version,
    error_types,
)
from kvservice.wire.frames import (
    ANSWERS,
    GOOD,
    HEAD,
    QUESTIONS,
    Frame,
    FrameKind,
    FrameReader,
    decode_failure,
    encode_failure,
    pack_frame,
)
from kvservice.wire.parsing import parse

MOST = 1000
FRAMES = st.lists(
    st.builds(
        Frame,
        st.sampled_from(FrameKind),
        st.integers(0, 255),
        st.integers(0, (1 << 64) - 1),
        st.binary(max_size=MOST - 60),
        st.sampled_from([b"", b"0" * 55]),
    ),
    max_size=8,
)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """The bytes, cut where these numbers say."""
    places = sorted(cut % (len(data) + 1) for cut in cuts)
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        yield data[start:end]


@given(FRAMES, st.lists(st.integers(0, 100_000), max_size=20))
def test_frames_come_out_as_they_went_in_whatever_the_cuts(frames: list[Frame], cuts: list[int]) -> None:
    sent = b"".join(pack_frame(FrameKind(one.kind), one.call, one.body, one.status, one.trace) for one in frames)
    reader = FrameReader(MOST)
    assert [frame for piece in pieces(sent, cuts) for frame in reader.feed(piece)] == frames


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_a_strangers_bytes_are_frames_or_refused(data: bytes, cuts: list[int]) -> None:
    """However they are cut, the frames before the refusal are the same."""

    def read(given: Iterator[bytes]) -> tuple[list[Frame], bool]:
        reader, found = FrameReader(MOST), list[Frame]()
        try:
            for piece in given:
                found.extend(reader.feed(piece))
        except InvalidRequest:
            return found, True
        return found, False

    whole, cut = FrameReader(MOST), read(pieces(data, cuts))
    found: list[Frame] = []
    try:
        for frame in whole.feed(data):
            found.append(frame)
    except InvalidRequest:
        assert cut[1]
    else:
        assert not cut[1]
    assert found[: len(cut[0])] == cut[0]


def test_a_body_that_is_too_long_is_refused_by_its_head() -> None:
    with pytest.raises(InvalidRequest, match="1001 bytes"):
        list(FrameReader(MOST).feed(HEAD.pack(MOST + 1, FrameKind.SEAL, GOOD, 0, 1)))
    with pytest.raises(InvalidRequest):
        list(FrameReader(MOST).feed(HEAD.pack(3, FrameKind.SEAL, GOOD, 4, 1)))


@pytest.mark.parametrize("kind", sorted(error_types().items()), ids=lambda pair: pair[0])
def test_every_error_is_rebuilt_with_its_text_and_attributes(kind: tuple[str, type[KVServiceError]]) -> None:
    found = decode_failure(encode_failure(kind[1]("what to do", wanted_bytes=5, node="n\udc80")))
    assert type(found) is kind[1]
    assert (found.message, found.attributes) == ("what to do", {"wanted_bytes": "5", "node": "n?"})


def test_a_refusal_is_bounded_and_its_number_can_be_read() -> None:
    error = FingerprintMismatch("é" * 100_000, **{f"name{i}": "x" * 100_000 for i in range(100)})
    assert len(encode_failure(error)) < 200_000
    refused = decode_failure(encode_failure(another_version("the engine", 3, 1)))
    assert isinstance(refused, VersionMismatch) and refused.attributes == {"theirs": "3", "ours": "1"}


def test_an_error_that_only_another_version_knows_is_an_error() -> None:
    body = encode_failure(Unavailable("later")).replace(b"UNAVAILABLE", b"UNAVAILABLY")
    found = decode_failure(body)
    assert (type(found), found.message) == (KVServiceError, "later")
    assert "cannot be read" in decode_failure(b"\xff\xff").message


@given(st.sampled_from(sorted(QUESTIONS)), st.binary(max_size=200))
def test_bytes_are_a_message_of_their_kind_or_refused(kind: FrameKind, data: bytes) -> None:
    for messages in (QUESTIONS, ANSWERS):
        if kind in messages:
            try:
                parse(messages[kind], data)
            except InvalidRequest:
                continue
