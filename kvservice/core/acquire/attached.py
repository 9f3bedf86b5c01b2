"""Engines that are attached to a shard, and how they are listed for routers and people. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.window_groups import WINDOW_GROUPS_MAX
from kvservice.core.explain.records import name_engine
from kvservice.core.messages import AttachedEngine, EngineKind, EngineSpec
from kvservice.core.reconcile import Grants
from kvservice.core.segment.geometry import Geometry
from kvservice.errors import InvalidRequest, UnsupportedLayout
from kvservice.units import AttachmentId, format_bytes

_Name = tuple[str, str, Fingerprint]


@dataclass(slots=True)
class EngineAttachment:
    """One attached engine. Mutable: it is the shard's own record."""

    attachment: AttachmentId
    spec: EngineSpec
    account: str  # the tenant that it belongs to
    attached_at: float
    seconds_per_block: float = 0.0  # of prefill, as the engine reported it last
    grants: Grants = field(default_factory=Grants)
    block_mark: bytes = field(init=False)  # of its fingerprint

    def __post_init__(self) -> None:
        self.block_mark = self.spec.fingerprint.block_mark

    @property
    def name(self) -> _Name:
        return self.spec.namespace, self.spec.model, self.spec.fingerprint


def check_layouts(spec: EngineSpec, geometry: Geometry) -> None:
    """Raises InvalidRequest for more KV cache groups than there are, UnsupportedLayout for blocks that fit no slab."""
    count = len(spec.window_groups)
    if count > WINDOW_GROUPS_MAX:
        raise InvalidRequest(f"an engine has at most {WINDOW_GROUPS_MAX} window groups, not {count}")
    layouts = (spec.layout, *(group.layout for group in spec.window_groups))
    payload_bytes = max(layout.payload_bytes for layout in layouts)
    if geometry.slots_per_slab(payload_bytes) == 0:
        raise UnsupportedLayout(
            f"one block of {spec.model} is {format_bytes(payload_bytes)} and does not fit a slab of "
            f"{format_bytes(geometry.slab_bytes)}: raise slab_bytes or the pool size, or use a smaller block size",
            payload_bytes=payload_bytes,
            slab_bytes=geometry.slab_bytes,
        )


def list_engines(engines: Iterable[EngineAttachment], now: float) -> list[AttachedEngine]:
    return [
        AttachedEngine(
            name_engine(attached.spec.engine_id),
            attached.spec.model,
            attached.spec.namespace,
            attached.spec.fingerprint.short,
            attached.account,
            attached.spec.layout.block_tokens,
            now - attached.attached_at,
            attached.seconds_per_block,
            attached.attachment,
        )
        for attached in engines
    ]


def kinds_of(engines: Iterable[EngineAttachment]) -> tuple[EngineKind, ...]:
    """One for each model and fingerprint, sorted."""
    kinds: dict[_Name, list[EngineAttachment]] = {}
    for attached in engines:
        kinds.setdefault(attached.name, []).append(attached)
    return tuple(
        EngineKind(*name, members[0].spec.layout, len(members), max(m.seconds_per_block for m in members))
        for name, members in sorted(kinds.items(), key=lambda item: _order(item[0]))
    )


def _order(name: _Name) -> tuple[str, str, object]:
    return name[0], name[1], name[2].fields
