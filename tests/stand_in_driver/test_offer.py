"""CudaOffer itself, with the four things that it asks of torch answered by the stand-in."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvservice.copying.cuda.driver import Driver
from kvservice.copying.cuda.offer import EVENTS, CudaOffer
from kvservice.copying.engine.link import WorkerLink
from kvservice.copying.message import CopyRow, Direction, PoolSource
from kvservice.core.segment.geometry import slot_index
from kvservice.errors import UnsupportedLayout
from kvservice.testing.eventually import eventually
from kvservice.units import Generation
from tests.gpu.slots import KEY, SLOT, payload, same, segment, write_header
from tests.stand_in_driver.engine import WEDGE_SECONDS, Cache, Event, cache_of, copy, worker


def offer_of(cache: Cache, monkeypatch: pytest.MonkeyPatch, event: type = Event) -> CudaOffer:
    name = SimpleNamespace(uuid=cache.driver.uuid.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: name)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: cache.stream)
    storage = SimpleNamespace(data_ptr=lambda: cache.address, nbytes=lambda: cache.layout.region_bytes)
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 0), untyped_storage=lambda: storage)
    return CudaOffer(tensor, lambda address, size: cache.layout)


def test_each_copy_of_an_offer_waits_for_its_event(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with cache_of(driver) as cache, worker() as (_, directory), segment() as made:
        offer = offer_of(cache, monkeypatch)
        link = WorkerLink(offer.offer, WEDGE_SECONDS)
        try:
            pool = PoolSource(1, str(made.path), made.geometry, made.epoch, SLOT, bytes(16))
            link.follow(directory, pool)
            eventually(lambda: link.is_ready, "the link")
            for attempt in range(EVENTS + 6):  # each event is used again
                slot = slot_index(0, attempt % 30)
                write_header(made, slot, 1)
                cache.kernel(attempt, 2000)
                assert copy(link, offer.mark, Direction.STORE, CopyRow(1, slot, Generation(1), KEY)).succeeded()
                assert same(payload(made, slot), bytes([attempt]) * SLOT.payload_bytes)
        finally:
            link.close()


def test_gpu_without_shared_events_is_refused_with_the_reason(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slice of a GPU, for example; the engine then copies in its own process."""

    class Unshared(Event):
        def ipc_handle(self) -> bytes:
            raise RuntimeError("CUDA error: operation not supported")

    with cache_of(driver) as cache, pytest.raises(UnsupportedLayout, match="operation not supported"):
        offer_of(cache, monkeypatch, Unshared)
