"""A block as a tier holds it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.units import BlockKey, SpanRoute


@dataclass(frozen=True, slots=True)
class TierBlock:
    """What is known of one block in a tier. The header of its file or object says the same, and is checked as read."""

    key: BlockKey
    payload_bytes: int  # as the engine reads it, not as a codec stored it
    digest: int  # of those bytes (core.segment.digest); 0 = only the header in the tier says it
    position: int
    route: SpanRoute
    account_tag: int = 0  # the tenant that is charged for it (core.block.tenants.tag_of); 0 is nobody
    fingerprint: bytes = b""  # first 16 bytes of the digest of its engine's fingerprint; b"" = not known
    stored_at: float = 0.0  # when its bytes were computed: seconds since 1970, by that node's clock; 0 = not known
    stored_bytes: int = 0  # of its payload in this tier, as a codec left it; 0 = not known: as much as payload_bytes
