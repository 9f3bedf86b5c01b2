"""A worker process of a GPU and an engine process (this one) on the same GPU, with CUDA IPC between them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvservice.copying.engine.link import Copies, WorkerLink
from kvservice.copying.message import CopyOutcome, CopyRow, Direction, PoolSource
from kvservice.core.segment.geometry import slot_index
from kvservice.discovery import node_directory
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.units import Generation, NodeId
from tests.gpu.device import block_bytes, kv_cache, layout_of
from tests.gpu.slots import BLOCKS, KEY, ORDERS, SLOT, segment, write_header

pytestmark = pytest.mark.gpu

WEDGE_SECONDS = 3.0


@contextlib.contextmanager
def worker(device: int = 0) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        command = [sys.executable, "-m", "kvservice", "copy-worker", "--service", "s", "--node", "n"]
        environment = {**os.environ, "KVSERVICE_RUNTIME_DIR": folder}
        command += ["--device", str(device)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            assert "listens" in process.stdout.readline()
            yield process, node_directory("s", NodeId("n"), Path(folder))
        finally:
            process.terminate()
            process.wait(30)
            process.stdout.close()


@contextlib.contextmanager
def linked(
    cache: torch.Tensor, directory: Path, made: Segment, worker_device: str | None = None
) -> Iterator[tuple[WorkerLink, Callable[[], int]]]:
    """`worker_device`: lend to the worker of this other GPU instead."""
    from kvservice.copying.cuda.offer import CudaOffer

    offer = CudaOffer(cache, lambda address, size: layout_of(cache))
    link = WorkerLink(offer.offer, WEDGE_SECONDS, worker_device=worker_device)
    try:
        source = PoolSource(1, str(made.path), made.geometry, made.epoch, SLOT, bytes(16))
        link.follow(directory, source)
        eventually(lambda: link.is_ready, "the link")
        yield link, offer.mark
    finally:
        link.close()


def copy(link: WorkerLink, mark: Callable[[], int], direction: Direction, *rows: CopyRow) -> Copies:
    ticket = link.submit(direction, rows)
    assert ticket is not None
    link.flush(mark())
    return ticket


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_go_through_the_worker_and_come_back(order: str) -> None:
    cache = kv_cache(order)
    with worker() as (_, directory), segment() as made, linked(cache, directory, made) as (link, mark):
        slots = [slot_index(0, index) for index in range(8)]
        for slot in slots:
            write_header(made, slot, 1)
        rows = [CopyRow(block, slot, Generation(1), KEY) for block, slot in enumerate(slots)]
        ticket = copy(link, mark, Direction.STORE, *rows)
        ticket.synchronize()
        assert ticket.succeeded()
        assert [bytes(made.payload(slot, SLOT.payload_bytes)) for slot in slots] == [
            block_bytes(cache, block) for block in range(8)
        ]
        for slot in slots:
            write_header(made, slot, 2)
        ticket = copy(
            link, mark, Direction.LOAD, *(CopyRow(20 + i, s, Generation(2), KEY) for i, s in enumerate(slots))
        )
        ticket.synchronize()
        assert ticket.succeeded()
        assert all(torch.equal(cache[:, 20 + i], cache[:, i]) for i in range(8))


def test_store_waits_for_the_kernels_that_write_the_block() -> None:
    cache = kv_cache("lbhn")
    with worker() as (_, directory), segment() as made, linked(cache, directory, made) as (link, mark):
        for attempt in range(20):
            slot = slot_index(0, attempt)
            write_header(made, slot, 1)
            torch.cuda._sleep(50_000_000)  # tens of milliseconds of a kernel
            cache[:, 3] = attempt
            ticket = copy(link, mark, Direction.STORE, CopyRow(3, slot, Generation(1), KEY))
            ticket.synchronize()
            assert bytes(made.payload(slot, SLOT.payload_bytes)) == block_bytes(cache, 3)


def test_stale_slot_is_not_written() -> None:
    cache = kv_cache("lbhn")
    with worker() as (_, directory), segment() as made, linked(cache, directory, made) as (link, mark):
        write_header(made, slot_index(0, 0), 3)
        ticket = copy(link, mark, Direction.STORE, CopyRow(0, slot_index(0, 0), Generation(1), KEY))
        ticket.synchronize()
        assert ticket.outcome is CopyOutcome.STALE
        assert bytes(made.payload(slot_index(0, 0), SLOT.payload_bytes)) == bytes(SLOT.payload_bytes)


def test_killed_worker_ends_every_copy_and_gives_the_memory_back() -> None:
    free_before, _ = torch.cuda.mem_get_info()
    cache = kv_cache("blhn")
    with worker() as (process, directory), segment() as made:
        with linked(cache, directory, made) as (link, mark):
            process.send_signal(signal.SIGSTOP)
            rows = [CopyRow(block, slot_index(0, block), Generation(1), KEY) for block in range(BLOCKS)]
            ticket = copy(link, mark, Direction.STORE, *rows)
            process.kill()
            ticket.synchronize()
            assert not ticket.succeeded()
        del cache
        torch.cuda.empty_cache()
        eventually(lambda: torch.cuda.mem_get_info()[0] > free_before - (64 << 20), "the memory to be free again")
