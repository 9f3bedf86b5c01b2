"""Hand-offs as an engine sees them: what `kv_transfer_params` of a request may say, and when a hand-off is over.

A proxy gives each prompt a random 16-byte id and sends it to two engines, at the same time or one after the other:

    prefill   {"kvservice": {"version": 1, "role": "prefill", "handoff": "<32 hex digits>"}}
    decode    {"kvservice": {"version": 1, "role": "decode", "handoff": "<the same>", "node": "<node of the prefill>"}}

The prefill engine's answer contains the second form, so a proxy that asks one after the other passes it on unchanged.
`{"do_remote_decode": true}` alone, which proxies for other connectors send, means prefill with an id of our own.

A prompt's first N tokens may be public, with or without a hand-off. Tenants that may use public blocks share them:

    {"kvservice": {"version": 1, "public_tokens": N}}

Other keys of the parameters are ignored. What is under "kvservice" comes from outside and is checked in full.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvservice.connector.scheduler.ports import SessionPort
from kvservice.core.messages import Handoff
from kvservice.errors import InvalidRequest
from kvservice.units import NAME_CHARS_MAX, AttachmentId, HandoffId, NodeId

NAME = "kvservice"
VERSION = 1  # of these parameters; another version is refused by name
OF_HANDOFFS = frozenset(("role", "handoff", "node"))  # the keys of a hand-off; hints and switches have others
PUBLIC_TOKENS_MAX = 1 << 24  # 16 million tokens, more than any context; a larger number is refused
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the prompt for another engine. With `handoff_id` None nobody knows of the hand-off yet, so any fresh id
    will do."""

    handoff_id: HandoffId | None = None


def parse_transfer_params(params: object) -> Prefill | Handoff | None:
    """What the request asks for; None for an ordinary one. Raises InvalidRequest that names what is wrong."""
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise InvalidRequest(f"kv_transfer_params must be an object, not a {type(params).__name__}")
    ours = params.get(NAME)
    if ours is None:
        return Prefill() if params.get("do_remote_decode") is True else None
    if not isinstance(ours, Mapping):
        raise InvalidRequest(f"kv_transfer_params.{NAME} must be an object, not a {type(ours).__name__}")
    check_version(ours)
    if ours.keys() & {"public_tokens", "store", "load", "hints"} and not ours.keys() & OF_HANDOFFS:
        return None
    given = ours.get("handoff")
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise InvalidRequest(f"kv_transfer_params.{NAME}.handoff must be 32 lower-case hexadecimal digits")
    handoff_id = HandoffId(bytes.fromhex(given))
    role = ours.get("role")
    if role == "prefill":
        return Prefill(handoff_id)
    if role != "decode":
        raise InvalidRequest(f'kv_transfer_params.{NAME}.role must be "prefill" or "decode"')
    node = ours.get("node")
    if not isinstance(node, str) or not 0 < len(node) <= NAME_CHARS_MAX or not node.isprintable():
        raise InvalidRequest(
            f"kv_transfer_params.{NAME}.node must be a node's id of 1 to {NAME_CHARS_MAX} printable characters"
        )
    return Handoff(handoff_id, NodeId(node))


def parse_public_tokens(params: object) -> int:
    """The number of leading tokens of the prompt that are public; 0 for none. Raises InvalidRequest."""
    ours = params.get(NAME) if isinstance(params, Mapping) else None
    if not isinstance(ours, Mapping) or "public_tokens" not in ours:
        return 0
    count = ours["public_tokens"]
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= PUBLIC_TOKENS_MAX:
        raise InvalidRequest(f"kv_transfer_params.{NAME}.public_tokens must be a number of tokens")
    check_version(ours)
    return count


def check_version(ours: Mapping[str, object]) -> None:
    """Raises InvalidRequest for our part of the parameters in another version."""
    if ours.get("version") != VERSION:
        raise InvalidRequest(
            f"kv_transfer_params.{NAME}.version is {ours.get('version')!r:.40}, and this engine knows {VERSION} only"
        )


def decode_params(handoff: Handoff) -> dict[str, object]:
    """The parameters for the engine that continues. The last two keys are for proxies made for other connectors."""
    ours = {"version": VERSION, "role": "decode", "handoff": handoff.handoff_id.hex(), "node": handoff.node_id}
    return {NAME: ours, "do_remote_prefill": True, "do_remote_decode": False}


@dataclass(slots=True)
class _Writing:
    attachment: AttachmentId
    open_requests: int = 1  # more if a client gave several prompts one id
    open_stores: int = 0  # their copies may end later than they do


class WriterHandoffs:
    """The hand-offs that this engine writes for. Each is closed once its requests and its last store have ended."""

    def __init__(self, session: SessionPort) -> None:
        self._session = session
        self._open: dict[HandoffId, _Writing] = {}

    def open(self, handoff: HandoffId, counters: Counter[str]) -> HandoffId | None:
        """Begin to write for it. None without a pool."""
        if (known := self._open.get(handoff)) is not None:
            known.open_requests += 1
            return handoff
        attachment = self._session.open_handoff(handoff)
        if attachment is None:
            counters["handoff_without_pool"] += 1
            return None
        self._open[handoff] = _Writing(attachment)
        counters["handoffs_written"] += 1
        return handoff

    def store_begun(self, handoff: HandoffId | None) -> None:
        if handoff in self._open:
            self._open[handoff].open_stores += 1

    def store_ended(self, handoff: HandoffId | None) -> None:
        if handoff in self._open:
            self._open[handoff].open_stores -= 1
            self._settle(handoff)

    def request_ended(self, handoff: HandoffId | None) -> None:
        if handoff in self._open:
            self._open[handoff].open_requests -= 1
            self._settle(handoff)

    def end_all(self) -> None:
        """Store nothing more for any of them. An engine that follows one computes the rest."""
        for handoff, writing in self._open.items():
            self._session.close_handoff(writing.attachment, handoff)
        self._open.clear()

    def _settle(self, handoff: HandoffId) -> None:
        writing = self._open[handoff]
        if not writing.open_requests and not writing.open_stores:
            del self._open[handoff]
            self._session.close_handoff(writing.attachment, handoff)

    def check_invariants(self) -> None:
        for writing in self._open.values():
            assert writing.open_requests >= 0
            assert writing.open_stores >= 0
            assert writing.open_requests or writing.open_stores, "a hand-off that is over is still open"
