"""Rules of proxy.bodies and proxy.settings: what is sent, what is refused, what is believed."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.errors import ConfigError, InvalidRequest
from kvservice.proxy.bodies import (
    EVENT_BYTES_MAX,
    EventTail,
    decode_body,
    error_event,
    model_of,
    node_of,
    prefill_body,
    prompt_chars,
    read_body,
)
from kvservice.proxy.plan import BROKEN, HandoffSource
from kvservice.proxy.relay import new_handoff_id
from kvservice.proxy.settings import ProxySettings, base_url, parse_settings
from kvservice.proxy.upstream import AnswerKind, forwarded_headers, kind_of
from kvservice.units import MiB

ID = "0123456789abcdef" * 2
PREFILL_PARAMS = {
    "kvservice": {"version": 1, "role": "prefill", "handoff": ID},
    "do_remote_decode": True,
    "do_remote_prefill": False,
}
DECODE_PARAMS = {
    "kvservice": {"version": 1, "role": "decode", "handoff": ID, "node": "n-1"},
    "do_remote_prefill": True,
    "do_remote_decode": False,
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def encode(value: object) -> bytes:
    return json.dumps(value).encode()


def test_prefill_asks_for_one_token_without_stream() -> None:
    asked = {
        "model": "m",
        "prompt": "text",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 100,
        "max_completion_tokens": 100,
        "n": 3,
        "min_tokens": 5,
        "temperature": 0.5,
        "logprobs": 2,
        "cache_salt": "s",
    }
    assert json.loads(prefill_body(read_body(encode(asked)), ID)) == {
        "model": "m",
        "prompt": "text",
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "temperature": 0.5,
        "cache_salt": "s",
        "kv_transfer_params": PREFILL_PARAMS,
    }
    assert "max_completion_tokens" not in json.loads(prefill_body(read_body(b'{"prompt": "x"}'), ID))


def test_fields_that_need_a_dropped_one_are_dropped_too() -> None:
    """vLLM refuses `logprob_token_ids` and `top_logprobs` without `logprobs`, and the refusal would be the client's."""
    asked = {"prompt": "text", "logprobs": 2, "logprob_token_ids": [5, 6], "top_logprobs": 2}
    sent = json.loads(prefill_body(read_body(encode(asked)), ID))
    assert not sent.keys() & {"logprobs", "logprob_token_ids", "top_logprobs"}


def test_decode_without_hand_off_gets_the_clients_bytes() -> None:
    raw = b' {"prompt" : "\xc3\xa4", "temperature": 1e-1}\n'
    assert decode_body(read_body(raw), None) == raw


def test_a_byte_order_mark_before_a_body_does_no_harm() -> None:
    raw = encode({"prompt": "x"})
    assert decode_body(read_body(b"\xef\xbb\xbf" + raw), None) == raw


@given(st.dictionaries(st.text().filter(lambda name: name not in ("kv_transfer_params", "vllm_xargs")), json_values))
def test_decode_gets_the_clients_body_and_the_parameters(body: dict[str, Any]) -> None:
    raw = encode(body) + b"\r\n "
    sent = decode_body(read_body(raw), HandoffSource(ID, "n-1"))
    assert json.loads(sent) == {**body, "kv_transfer_params": DECODE_PARAMS}
    assert sent.startswith(raw.rstrip()[:-1])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[1]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b'{"a": ' + b"[" * 200_000,
        encode({"kv_transfer_params": {}}),
        encode({"kv_transfer_params": None}),
        encode({"vllm_xargs": {"kv_transfer_params": "x"}}),
        '{"a": 1}'.encode("utf-16"),
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
)
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    """So is one that sets the transfer parameters."""
    with pytest.raises(InvalidRequest):
        read_body(raw)


@given(st.dictionaries(st.sampled_from(["prompt", "messages", "tools", "stream", "use_beam_search"]), json_values))
def test_bodies_of_any_types_are_measured_without_an_error(body: dict[str, Any]) -> None:
    assert read_body(encode(body)).prompt_chars >= 0


def test_prompts_of_all_kinds_are_measured() -> None:
    assert prompt_chars({"prompt": "abc"}) == 3
    assert prompt_chars({"prompt": ["abc", "de"]}) == 5
    assert prompt_chars({"prompt": [1, 2, 3]}) == prompt_chars({"prompt": [[1, 2, 3]]}) == 12
    parts = [{"type": "text", "text": "abcd"}]
    assert prompt_chars({"messages": [{"role": "system", "content": "ab"}, {"role": "user", "content": parts}]}) == 6
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    assert prompt_chars({"messages": [{"role": "user", "content": [image]}]}) > 512


@pytest.mark.parametrize(
    ("body", "single"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": ["a"]}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": [[1, 2]]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"messages": []}, True),
        ({"prompt": "a", "use_beam_search": True}, False),
        ({"prompt": "a", "echo": True, "logprobs": 1}, False),
        ({"prompt": "a", "prompt_logprobs": 0}, False),
        ({"prompt": "a", "echo": False, "logprobs": 1, "prompt_logprobs": None}, True),
    ],
)
def test_only_one_prompt_can_be_handed_off(body: dict[str, Any], single: bool) -> None:
    assert read_body(encode(body)).single is single


def test_the_node_is_read_from_a_good_answer_only() -> None:
    def answer(**own: object) -> bytes:
        return encode({"id": "x", "kv_transfer_params": {**DECODE_PARAMS, "kvservice": own}})

    assert node_of(answer(version=1, role="decode", handoff=ID, node="n-1")) == "n-1"
    assert node_of(answer(version=2, role="decode", handoff=ID, node="n-1")) is None
    assert node_of(answer(version=1, role="prefill", handoff=ID, node="n-1")) is None
    assert node_of(answer(version=1, role="decode", node="")) is None
    assert node_of(answer(version=1, role="decode", node=7)) is None
    for raw in (b"", b"[]", b"{}", encode({"kv_transfer_params": None}), encode({"kv_transfer_params": {"a": 1}})):
        assert node_of(raw) is None


def test_the_model_is_the_first_of_the_list() -> None:
    assert model_of(encode({"data": [{"id": "a"}, {"id": "b"}]})) == "a"
    for raw in (b"", b"[]", encode({"data": []}), encode({"data": [1]}), encode({"data": [{"id": None}]})):
        assert model_of(raw) is None


def test_ids_are_fresh_and_well_formed() -> None:
    ids = {new_handoff_id() for _ in range(100)}
    assert len(ids) == 100 and all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


@given(st.lists(st.sampled_from([b"data: a", b"\n", b"\r\n", b"\r", b"\n\n", b"data: [DONE]\n\n"]), max_size=30))
def test_an_event_stream_passes_byte_for_byte_in_whole_events(chunks: list[bytes]) -> None:
    tail, seen = EventTail(), b""
    for chunk in chunks:
        piece = tail.feed(chunk)
        assert piece == b"" or piece.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))
        seen += piece
    assert seen + tail.rest() == b"".join(chunks)


def test_an_event_without_end_is_not_held_back_for_ever() -> None:
    assert len(EventTail().feed(b"x" * (EVENT_BYTES_MAX + 1))) == EVENT_BYTES_MAX + 1


def test_the_error_event_is_one_event_and_the_end() -> None:
    first, second, rest = error_event(BROKEN).split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["error"]["code"] == 502
    assert (second, rest) == (b"data: [DONE]", b"")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, AnswerKind.GOOD),
        (400, AnswerKind.REFUSED),
        (404, AnswerKind.REFUSED),
        (501, AnswerKind.REFUSED),
        (429, AnswerKind.BUSY),
        (500, AnswerKind.FAULTY),
        (503, AnswerKind.FAULTY),
        (302, AnswerKind.FAULTY),
    ],
)
def test_a_status_says_who_is_at_fault(status: int, kind: AnswerKind) -> None:
    assert kind_of(status) is kind


def test_authorization_is_forwarded() -> None:
    """What concerns the connection is not."""
    given_headers = {
        "Authorization": "Bearer k",
        "X-Request-Id": "7",
        "Host": "h",
        "Content-Length": "5",
        "Connection": "X-Hop",
        "X-Hop": "1",
        "Accept-Encoding": "gzip",
        "Transfer-Encoding": "chunked",
    }
    assert dict(forwarded_headers(given_headers)) == {"Authorization": "Bearer k", "X-Request-Id": "7"}


def test_addresses_are_taken_with_and_without_a_slash() -> None:
    assert base_url("http://h:8000/") == "http://h:8000"
    assert base_url("https://h/prefix") == "https://h/prefix"
    assert base_url("http://[::1]:8000") == "http://[::1]:8000"


@pytest.mark.parametrize("text", ["", "h:8000", "ftp://h", "http://", "http://h:x", "http://h/v1", "http://u:p@h"])
def test_an_address_that_cannot_work_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        base_url(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"decode": ()},
        {"decode": ("http://a", "http://a")},
        {"request_seconds": 0},
        {"in_flight_max": 0},
        {"grace_seconds": -1},
        {"grace_seconds": math.nan},
        {"connect_seconds": math.inf},
        {"prefill_seconds": math.inf},
        {"check_seconds": math.nan},
        {"min_prefill_chars": -1},
        {"body_bytes_max": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ProxySettings(**{"prefill": (), "decode": ("http://d",), **wrong})


def test_sizes_are_read_as_everywhere() -> None:
    assert parse_settings([], ["http://d/"], max_body="2MiB").body_bytes_max == 2 * MiB
    with pytest.raises(ConfigError):
        parse_settings([], ["http://d"], max_body="much")
