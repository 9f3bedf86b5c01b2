"""Under which names a request's blocks go: by tenant, by what is public, and after an attachment has changed."""

from __future__ import annotations

import pytest

from kvservice.connector.scheduler.handoff import Prefill, parse_public_tokens, parse_transfer_params
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.connector.scheduler.request_keys import Keyring
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.core.block.keys import block_keys, term_key, version_term
from kvservice.core.block.window_groups import group_key
from kvservice.core.messages import Attachment
from kvservice.core.segment.geometry import Geometry
from kvservice.errors import InvalidRequest
from kvservice.units import AttachmentId, BlockHash, BootEpoch, MiB, NodeId
from tests.unit.connector.line import BLOCK, hashes

DIGEST = b"d" * 32
HASHES = hashes(1, 6)


def attachment(tenant: bytes = b"mine", public: bytes = b"", *, publishes: bool = False) -> Attachment:
    geometry = Geometry(slab_bytes=MiB, slab_count=1)
    return Attachment(AttachmentId(1), NodeId("n"), BootEpoch(1), 9.0, "", geometry, "", tenant, public, publishes)


def keyring() -> Keyring:
    return Keyring(lambda found, key: block_keys(DIGEST, found, key), BLOCK)


def names(found: list[BlockHash], key: bytes) -> list[bytes]:
    return list(block_keys(DIGEST, found, key))


def test_without_tenants_the_names_are_those_of_ever() -> None:
    request = EngineRequest("r", [], terms=RequestTerms(public_tokens=2 * BLOCK))
    assert keyring().extend(request, HASHES, attachment(b"")) == 6
    assert request.keys == names(HASHES, b"")


def test_only_whole_leading_blocks_are_public() -> None:
    """They are so only for tenants that may share."""
    mine = names(HASHES, b"mine")
    request = EngineRequest("r", [], [[]], terms=RequestTerms(public_tokens=2 * BLOCK + 1))
    rings = keyring()
    assert rings.extend(request, HASHES[:1], attachment(public=b"all", publishes=True)) == 1
    assert rings.extend(request, HASHES, attachment(public=b"all", publishes=True)) == 5
    assert request.keys == [*names(HASHES[:2], b"all"), *mine[2:]]
    assert request.window_keys == [[group_key(key, 1) for key in request.keys]]
    assert request.stored == 0
    refused = EngineRequest("s", [], terms=RequestTerms(public_tokens=2 * BLOCK))
    keyring().extend(refused, HASHES, attachment())
    assert refused.keys == mine


def test_public_blocks_that_may_only_be_read_are_never_stored() -> None:
    request = EngineRequest("r", [], terms=RequestTerms(public_tokens=2 * BLOCK))
    assert keyring().extend(request, HASHES, attachment(public=b"all")) == 4
    assert (request.stored, request.kept_out) == (2, 2)


def test_names_made_before_attaching_are_not_used_after() -> None:
    request, rings = EngineRequest("r", []), keyring()
    rings.extend(request, HASHES, None)
    request.stored = 3
    assert not rings.is_current(request, attachment())
    assert rings.extend(request, HASHES, attachment()) == 6
    assert request.keys == names(HASHES, b"mine") and request.stored == 0
    assert "mine" not in repr(request.naming)


def test_public_tokens_are_asked_for_alone_or_beside_a_hand_off() -> None:
    assert parse_public_tokens(None) == parse_public_tokens({"kvservice": {"version": 1}}) == 0
    alone = {"kvservice": {"version": 1, "public_tokens": 64}}
    assert (parse_public_tokens(alone), parse_transfer_params(alone)) == (64, None)
    both = {"kvservice": {"version": 1, "public_tokens": 64, "role": "prefill", "handoff": "0" * 32}}
    assert parse_public_tokens(both) == 64 and isinstance(parse_transfer_params(both), Prefill)


@pytest.mark.parametrize("count", [-1, True, "64", 1.5, None, 1 << 40])
def test_nonsense_for_public_tokens_is_refused(count: object) -> None:
    with pytest.raises(InvalidRequest, match="public_tokens"):
        parse_public_tokens({"kvservice": {"version": 1, "public_tokens": count}})


def test_a_term_of_the_weights_changes_every_name() -> None:
    """It also changes those of requests that are there already."""
    rings = keyring()
    here = attachment(public=b"all", publishes=True)
    request = EngineRequest("r", [], terms=RequestTerms(public_tokens=2 * BLOCK))
    rings.extend(request, HASHES, here)
    before, request.stored = list(request.keys), 6
    rings.begin_term(b"one")
    assert not rings.is_current(request, here)
    rings.extend(request, HASHES, here)
    assert rings.is_current(request, here)
    assert not set(request.keys) & set(before)
    assert request.stored == 0
    assert request.keys == [*names(HASHES[:2], term_key(b"all", b"one")), *names(HASHES[2:], term_key(b"mine", b"one"))]
    fresh = EngineRequest("s", [], terms=RequestTerms(public_tokens=2 * BLOCK))
    Keyring(lambda found, key: block_keys(DIGEST, found, key), BLOCK, b"one").extend(fresh, HASHES, here)
    assert fresh.keys == request.keys, "an engine of this term from its start shares them"


def test_a_term_holds_for_later_attachments() -> None:
    """It also holds while there is none."""
    rings = keyring()
    request = EngineRequest("r", [])
    rings.begin_term(b"one")
    rings.extend(request, HASHES, None)
    assert request.keys == names(HASHES, term_key(b"", b"one"))
    rings.extend(request, HASHES, attachment())
    assert request.keys == names(HASHES, term_key(b"mine", b"one"))
    assert version_term("a") != version_term("b")
