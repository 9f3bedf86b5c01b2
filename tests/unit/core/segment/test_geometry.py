"""Rules of core.segment.geometry: nothing overlaps, nothing sticks out, payloads lie on pages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.segment import geometry as geo
from kvservice.core.segment.geometry import Geometry, index_in_slab, plan_geometry, slab_of, slot_index
from kvservice.errors import ConfigError
from kvservice.units import GiB, KiB, MiB

geometries = st.builds(
    Geometry,
    slab_bytes=st.integers(256, 1024).map(lambda pages: pages * geo.PAGE_BYTES),
    slab_count=st.integers(1, 4),
)


@given(st.integers(0, 1 << 20), st.integers(0, geo.SLOTS_PER_SLAB_MAX - 1))
def test_slot_index_keeps_slab_and_place(slab: int, place: int) -> None:
    slot = slot_index(slab, place)
    assert (slab_of(slot), index_in_slab(slot)) == (slab, place)


@given(geometries, st.integers(1, 2 * MiB))
def test_headers_and_payloads_of_a_slab_do_not_overlap(geometry: Geometry, payload_bytes: int) -> None:
    count = geometry.slots_per_slab(payload_bytes)
    slab = geometry.slab_count - 1
    start, end = geometry.slab_offset(slab), geometry.slab_offset(slab) + geometry.slab_bytes
    assert end <= geometry.segment_bytes
    places = [(start, start + geo.HEADER_BYTES)]  # the slab's own header
    for place in range(count):
        slot = slot_index(slab, place)
        header, payload = geometry.header_offset(slot), geometry.payload_offset(slot, payload_bytes)
        places += [(header, header + geo.HEADER_BYTES), (payload, payload + payload_bytes)]
        assert payload % geo.PAGE_BYTES == 0
    places.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(places))
    assert places[0][0] >= start and places[-1][1] <= end


@given(geometries, st.integers(1, 2 * MiB))
def test_no_further_slot_would_fit(geometry: Geometry, payload_bytes: int) -> None:
    more = geometry.slots_per_slab(payload_bytes) + 1
    stride = -(-payload_bytes // geo.PAGE_BYTES) * geo.PAGE_BYTES
    headers = -(-(geo.HEADER_BYTES * (1 + more)) // geo.PAGE_BYTES) * geo.PAGE_BYTES
    assert headers + more * stride > geometry.slab_bytes


def test_a_block_larger_than_a_slab_has_no_slot() -> None:
    geometry = Geometry(slab_bytes=MiB, slab_count=1)
    assert geometry.slots_per_slab(MiB) == 0
    assert geometry.slots_per_slab(MiB - geo.PAGE_BYTES) == 1


def test_slots_of_a_slab_are_limited_by_the_width_of_an_index() -> None:
    assert Geometry(slab_bytes=GiB, slab_count=1).slots_per_slab(1) == geo.SLOTS_PER_SLAB_MAX


def test_slabs_follow_control_page_and_scratch() -> None:
    geometry = Geometry(slab_bytes=MiB, slab_count=2)
    assert geometry.scratch_offset == geo.CONTROL_BYTES
    assert geometry.slab_offset(0) == geo.CONTROL_BYTES + geo.SCRATCH_BYTES
    assert geometry.slab_offset(2) == geometry.segment_bytes


@given(st.integers(0, 8 * GiB))
def test_a_plan_never_exceeds_its_budget(budget: int) -> None:
    try:
        geometry = plan_geometry(budget)
    except ConfigError as error:
        needed = error.attributes["needed_bytes"]
        assert isinstance(needed, int) and budget < needed
        assert plan_geometry(needed).segment_bytes == needed
        return
    assert geometry.segment_bytes <= budget < geometry.segment_bytes + geometry.slab_bytes
    assert geometry.slab_count >= 8 or geometry.slab_bytes == geo.SLAB_BYTES_MIN


@pytest.mark.parametrize("slab_bytes", [0, MiB - geo.PAGE_BYTES, MiB + 1, -MiB])
def test_odd_slab_sizes_are_refused(slab_bytes: int) -> None:
    with pytest.raises(ConfigError):
        plan_geometry(GiB, slab_bytes)


def test_a_budget_below_zero_is_refused_with_the_smallest_one() -> None:
    with pytest.raises(ConfigError, match="the smallest is"):
        plan_geometry(-1)


def test_large_budgets_use_default_slabs() -> None:
    assert plan_geometry(4 * GiB).slab_bytes == geo.SLAB_BYTES_DEFAULT
    assert plan_geometry(4 * GiB, 256 * KiB * 8).slab_bytes == 2 * MiB


def test_a_slab_that_is_no_whole_pages_holds_only_what_fits() -> None:
    """A peer's geometry may be anything: headers are rounded up to pages, and must not push payloads out."""
    assert Geometry(slab_bytes=geo.PAGE_BYTES + 2 * geo.HEADER_BYTES, slab_count=1).slots_per_slab(geo.PAGE_BYTES) == 0
