"""OpenAI bodies as the proxy reads and writes them: requests, hand-off parameters, errors, event streams.

Pure. No input is trusted: a function raises InvalidRequest or returns None for what it cannot read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvservice.errors import InvalidRequest
from kvservice.proxy.plan import HandoffSource, Problem

HANDOFF_VERSION = 1  # the connector ignores parameters of another version, and so do we: nothing is handed off then
PARAMS = "kv_transfer_params"
OWN = "kvservice"  # the key of our part of the parameters
# An image or another part without text counts as this many characters. It is 1,000 tokens, about what one image takes.
MEDIA_CHARS = 4096
CHARS_PER_TOKEN = 4  # Used for prompts that come as token ids. English text has about four characters a token.
# The most bytes of one server-sent event that are held back until it is complete. Beyond it they go out in pieces.
EVENT_BYTES_MAX = 1 << 20
PROBE_PROMPT = "Hello"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DONE = b"[DONE]"  # the last event of every stream that is complete
# Limits of one request body. Parsing JSON stops all other requests on the loop: a body that is nothing but empty lists
# would stop them for seconds and take thirty times its size in memory. Beyond a limit the request is refused.
LISTS_MAX = 1 << 20  # Lists and objects. Brackets in the text of a prompt count as well.
VALUES_MAX = 1 << 22  # Other values, for example token ids: far more than the longest context has.

# Fields of the client's request that make no sense for one token, or that cost work whose result is thrown away.
_DROPPED_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "best_of",
)
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
# A quote within a text is escaped in JSON, so this is never part of a prompt or of what a model said.
_GIVEN_UP = re.compile(rb'"finish_reason":\s*"abort"')


@dataclass(frozen=True, slots=True)
class ClientBody:
    """A request body that was read and found acceptable."""

    raw: bytes  # the bytes as they came, without a byte order mark: a JSON object in UTF-8
    parsed: Mapping[str, Any]
    prompt_chars: int  # approximate length of the prompt, in characters
    single: bool  # one prompt, plain sampling, and nothing about the prompt's tokens; only that can be handed off


def read_body(raw: bytes) -> ClientBody:
    """Read a request body. Raises InvalidRequest with a message for the client. Everything not checked here is left to
    the server to refuse. A byte order mark before the text is left out: vLLM takes such a body as well."""
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    if raw.count(b"[") + raw.count(b"{") > LISTS_MAX or raw.count(b",") > VALUES_MAX:
        raise InvalidRequest(
            f"the request body has more than {LISTS_MAX} lists and objects, or more than {VALUES_MAX} values"
        )
    try:
        parsed = json.loads(raw.decode("utf-8"))
        chars = prompt_chars(parsed) if isinstance(parsed, dict) else 0
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not JSON in UTF-8: {str(error)[:200]}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("the request body must be a JSON object")
    extra = parsed.get("vllm_xargs")
    if PARAMS in parsed or (isinstance(extra, dict) and PARAMS in extra):
        raise InvalidRequest(f"{PARAMS} is set by this proxy: leave it out of the request")
    return ClientBody(
        raw=raw,
        parsed=parsed,
        prompt_chars=chars,
        single=_is_single(parsed),
    )


def prompt_chars(body: Mapping[str, Any]) -> int:
    """The characters of text in the prompt. Token ids and media are converted. Never raises, whatever the types."""
    total = _text_chars(body.get("prompt"))
    messages = body.get("messages")
    if isinstance(messages, list):
        total += sum(_text_chars(each.get("content")) for each in messages if isinstance(each, dict))
    tools = body.get("tools")
    return total + (len(json.dumps(tools)) if isinstance(tools, list) else 0)


def _text_chars(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0
    total = 0
    for part in content:
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, int):
            total += CHARS_PER_TOKEN
        elif isinstance(part, list):
            total += CHARS_PER_TOKEN * len(part)
        elif isinstance(part, dict):
            text = part.get("text")
            total += len(text) if isinstance(text, str) else MEDIA_CHARS
    return total


def _is_single(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    # vLLM reads no cache then, because it needs the model's output for each token of the prompt
    about_prompt = body.get("prompt_logprobs") is not None or body.get("echo") is True
    return not several and not about_prompt and body.get("use_beam_search") is not True


def prefill_body(body: ClientBody, handoff_id: str, traceparent: str = "") -> bytes:
    """The client's body as a prefill request: one token, and the computed blocks are handed off under `handoff_id`."""
    wanted = {name: value for name, value in body.parsed.items() if name not in _DROPPED_FOR_PREFILL}
    params = prefill_params(handoff_id) | traced(traceparent)
    wanted |= {"stream": False, "max_tokens": 1, "n": 1, PARAMS: params}
    if "max_completion_tokens" in wanted:
        wanted["max_completion_tokens"] = 1
    return json.dumps(wanted).encode()


def probe_body(model: str, handoff_id: str) -> bytes:
    """The body of a /v1/completions request that is sent only to learn which node its answer names."""
    wanted = {"model": model, "prompt": PROBE_PROMPT, "max_tokens": 1, PARAMS: prefill_params(handoff_id)}
    return json.dumps(wanted).encode()


def prefill_params(handoff_id: str) -> dict[str, Any]:
    return {
        OWN: {"version": HANDOFF_VERSION, "role": "prefill", "handoff": handoff_id},
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }


def traced(traceparent: str) -> dict[str, str]:
    """The parameter that carries a trace into an engine: vLLM passes headers on only with a collector of its own."""
    return {"traceparent": traceparent} if traceparent else {}


def decode_body(body: ClientBody, handoff: HandoffSource | None, traceparent: str = "") -> bytes:
    """The client's body byte for byte, with the hand-off's parameters added as its last member."""
    if handoff is None:
        return body.raw
    params = {
        OWN: {"version": HANDOFF_VERSION, "role": "decode", "handoff": handoff.id, "node": handoff.node},
        "do_remote_prefill": True,
        "do_remote_decode": False,
        **traced(traceparent),
    }
    head = body.raw.rstrip(b" \t\r\n")[:-1]
    comma = b"," if body.parsed else b""
    return b"%s%s%s:%s}" % (head, comma, json.dumps(PARAMS).encode(), json.dumps(params).encode())


def node_of(answer: bytes) -> str | None:
    """The node that a prefill answer names. None if it names none, or speaks another version: then nothing is handed
    off."""
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    params = parsed.get(PARAMS) if isinstance(parsed, dict) else None
    own = params.get(OWN) if isinstance(params, dict) else None
    if not isinstance(own, dict) or own.get("version") != HANDOFF_VERSION or own.get("role") != "decode":
        return None
    node = own.get("node")
    return node if isinstance(node, str) and node else None


def model_of(answer: bytes) -> str | None:
    """The first model in an answer of /v1/models. None if there is none."""
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    data = parsed.get("data") if isinstance(parsed, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    model = first.get("id") if isinstance(first, dict) else None
    return model if isinstance(model, str) and model else None


def is_json(answer: bytes | bytearray) -> bool:
    """Whether this is a whole JSON text."""
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return False
    return True


def is_given_up(answer: bytes | bytearray) -> bool:
    """Whether the server gave up what it answers. vLLM does that, with status 200, when its engine is told to end."""
    return _GIVEN_UP.search(answer) is not None


def is_end(events: bytes) -> bool:
    """Whether this is the last event of a stream and nothing else."""
    return events.strip().removeprefix(b"data:").strip() == DONE


def split_events(events: bytes) -> list[bytes]:
    """The events one by one. Together they are what was given."""
    found, start = [], 0
    for match in _EVENT_END.finditer(events):
        found.append(events[start : match.end()])
        start = match.end()
    return [*found, events[start:]] if start < len(events) else found


def error_code(event: bytes) -> int | None:
    """The code in an event that is an error. None for any other event."""
    if b'"error"' not in event:
        return None
    try:
        parsed = json.loads(event.strip().removeprefix(b"data:"))
    except (ValueError, RecursionError):
        return None
    error = parsed.get("error") if isinstance(parsed, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else None


def error_body(problem: Problem) -> bytes:
    """An error in the form that OpenAI clients expect."""
    error = {"message": problem.message, "type": problem.kind, "param": None, "code": problem.status}
    return json.dumps({"error": error}).encode()


def error_event(problem: Problem) -> bytes:
    """The last events of a stream that failed."""
    return b"data: " + error_body(problem) + b"\n\ndata: " + DONE + b"\n\n"


class EventTail:
    """Passes an event stream on unchanged, but only in whole events, so that an error event can follow at any
    moment."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk. Returns the bytes that may go to the client now; a later call or `rest` returns the others."""
        data = self._tail + chunk
        ends = [match.end() for match in _EVENT_END.finditer(data)]
        cut = ends[-1] if ends else 0
        if len(data) - cut > EVENT_BYTES_MAX:
            cut = len(data)
        self._tail = data[cut:]
        return data[:cut]

    def rest(self) -> bytes:
        """The bytes held back when the stream ends regularly."""
        tail, self._tail = self._tail, b""
        return tail
