"""Copies between a GPU's KV cache and the pool: each way of doing them, in both directions, against the limits of the
machine in the same run: one plain `cudaMemcpyAsync` of the same bytes, and vLLM's own offloading copies.

    python -m benchmarks.gpu_copies            on the first GPU; measures nothing, and says so, where there is none
    python -m benchmarks.gpu_copies --host     a CPU engine's memory: in its process and in a worker, against memmove
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import print_table, write_report
from kvservice.copying.cuda.driver import is_present
from kvservice.copying.device import HOST
from kvservice.copying.engine.link import KVOffer, WorkerLink
from kvservice.copying.memory import SharedMemory
from kvservice.copying.message import NO_EVENT, CopyRow, Direction, MemoryKind, PoolSource
from kvservice.core.segment.copy_runs import CopyTemplate, Descriptors, RegionLayout
from kvservice.core.segment.geometry import plan_geometry, slot_index
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.layout import SlotLayout
from kvservice.discovery import node_directory
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.units import BlockKey, Generation, GiB, MiB, NodeId, SpanRoute

ROUNDS = 7
PINNING_SECONDS = 60.0
KEY = BlockKey(bytes(16))
# layers, kv heads, tokens a block, bytes of K and V of one token and head: SmolLM2-135M and Llama-3.1-8B in bfloat16
MODELS = {"30 layers, 3 heads": (30, 3, 32, 256), "32 layers, 8 heads": (32, 8, 16, 512)}
ORDERS = ("lbhn", "lbnh", "blhn")
BLOCKS_MOVED = 64


class Case:
    """One model and layout: a region, slots and the descriptors between them."""

    def __init__(self, model: tuple[int, int, int, int], order: str) -> None:
        layers, heads, tokens, cell = model
        self.slot = SlotLayout(layers, heads, tokens * cell, tokens)
        sizes = {"l": layers, "b": 2 * BLOCKS_MOVED, "h": heads, "n": tokens}
        stride, step = {}, cell
        for name in reversed(order):
            stride[name] = step
            step *= sizes[name]
        self.region = RegionLayout(
            step,
            2 * BLOCKS_MOVED,
            tuple(layer * stride["l"] for layer in range(layers)),
            1,
            heads,
            tokens,
            cell,
            stride["b"],
            0,
            stride["h"],
            stride["n"],
        )
        self.geometry = plan_geometry(4 * BLOCKS_MOVED * self.slot.payload_bytes + 256 * MiB)
        per_slab = self.geometry.slots_per_slab(self.slot.payload_bytes)
        self.slots = [slot_index(i // per_slab, i % per_slab) for i in range(BLOCKS_MOVED)]
        # Every other block, as after a while of serving: neighbours in the cache are seldom neighbours in a prompt.
        self.blocks = np.random.default_rng(0).permutation(2 * BLOCKS_MOVED)[:BLOCKS_MOVED].tolist()
        offsets = [self.geometry.payload_offset(slot, self.slot.payload_bytes) for slot in self.slots]
        self.runs: Descriptors = CopyTemplate(self.region, self.slot).expand(self.blocks, offsets)
        self.byte_count = self.runs.byte_count

    def rows(self, generation: int) -> list[CopyRow]:
        return [
            CopyRow(block, slot, Generation(generation), KEY)
            for block, slot in zip(self.blocks, self.slots, strict=True)
        ]


@contextmanager
def segment_of(case: Case) -> Iterator[Segment]:
    path = Path(f"/dev/shm/kvservice-bench{uuid.uuid4().hex[:8]}-n")
    made = Segment.create(path, case.geometry, "n")
    try:
        for slab in range(case.geometry.slab_count):
            made.assign_slab(slab, case.slot.payload_bytes)
        yield made
    finally:
        made.close()
        made.unlink()


def write_headers(segment: Segment, case: Case, generation: int) -> None:
    for slot in case.slots:
        header = SlotHeader(segment.epoch, Generation(generation), KEY, case.slot.payload_bytes, SpanRoute(0), 0, 0)
        segment.write_header(slot, header)


def gigabytes_per_second(case: Case, ways: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median over rounds in which the ways alternate, so that a busy machine slows all of them down."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    return {name: case.byte_count / statistics.median(taken[1:]) / 1e9 for name, taken in seconds.items()}


@contextmanager
def worker_link(device: str, offer: KVOffer, segment: Segment, slot: SlotLayout) -> Iterator[WorkerLink]:
    with tempfile.TemporaryDirectory(prefix="kvb-") as folder:
        command = [sys.executable, "-m", "kvservice", "copy-worker", "--service", "b", "--node", "n"]
        environment = {**os.environ, "KVSERVICE_RUNTIME_DIR": folder}
        process = subprocess.Popen([*command, "--device", device], stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        process.stdout.readline()
        directory = node_directory("b", NodeId("n"), Path(folder))
        link = WorkerLink(offer)
        try:
            link.follow(directory, PoolSource(1, str(segment.path), segment.geometry, segment.epoch, slot, bytes(16)))
            eventually(lambda: link.is_ready, "the worker to take the engine's memory")
            yield link
        finally:
            link.close()
            process.terminate()
            process.wait(30)
            process.stdout.close()


def through(
    link: WorkerLink, direction: Direction, rows: list[CopyRow], mark: Callable[[], int] = lambda: NO_EVENT
) -> float:
    """Let the worker do the copies of one step. Returns the seconds that the engine's thread was busy with them."""
    started = time.perf_counter()
    ticket = link.submit(direction, rows)
    if ticket is None:
        raise RuntimeError("the worker is gone")
    link.flush(mark())
    handed = time.perf_counter() - started
    ticket.synchronize()
    if not ticket.succeeded():
        raise RuntimeError(f"the worker says {ticket.outcome.name}")
    return handed


def host_figures(rounds: int) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    for model, sizes in MODELS.items():
        case = Case(sizes, "lbhn")
        kv = SharedMemory.make(case.region.region_bytes)
        memory = {"kind": MemoryKind.MEMFD.value, "bytes": kv.byte_count}
        offer = KVOffer(HOST, memory, case.region.fields(), kv.descriptor)
        with segment_of(case) as segment, worker_link(HOST, offer, segment, case.slot) as link:
            for direction, generation in ((Direction.STORE, 1), (Direction.LOAD, 2)):
                write_headers(segment, case, generation)
                figures.append({"model": model, **host_speeds(case, kv, segment, link, direction, rounds)})
        kv.close()
    return figures


def host_speeds(
    case: Case,
    kv: SharedMemory,
    segment: Segment,
    link: WorkerLink,
    direction: Direction,
    rounds: int,
) -> dict[str, Any]:
    import torch

    plain, target = np.ones(case.byte_count, np.uint8), np.ones(case.byte_count, np.uint8)
    rows, handed = case.rows(2 if direction is Direction.LOAD else 1), []

    ways: dict[str, Callable[[], object]] = {
        "memmove": lambda: ctypes.memmove(target.ctypes.data, plain.ctypes.data, case.byte_count),
        "worker": lambda: handed.append(through(link, direction, rows)),
    }
    with _by_torch(torch, torch.frombuffer(kv.buffer, dtype=torch.int8), case, "lbhn", segment) as by_torch:
        speeds = gigabytes_per_second(case, {**ways, "in process": by_torch(direction)}, rounds)
    return {
        "direction": direction.name.lower(),
        "bytes": case.byte_count,
        "gigabytes_per_second": speeds,
        "engine_thread_milliseconds": {
            "in process": case.byte_count / speeds["in process"] / 1e6,
            "worker": statistics.median(handed) * 1e3,
        },
    }


def gpu_figures(rounds: int) -> list[dict[str, Any]]:
    import torch

    from kvservice.copying.cuda.copies import CudaCopies, gather_launcher
    from kvservice.copying.cuda.driver import Driver
    from kvservice.copying.cuda.offer import CudaOffer
    from kvservice.copying.cuda.pinning import Pinning

    torch.cuda.init()
    driver = Driver.of_device(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    driver.bind()
    gather = gather_launcher(driver)
    figures: list[dict[str, Any]] = []
    for model, sizes in MODELS.items():
        for order in ORDERS:
            case = Case(sizes, order)
            kv = torch.zeros(case.region.region_bytes, dtype=torch.int8, device="cuda")
            with segment_of(case) as segment:
                pinning = Pinning(segment.address, case.geometry, driver.pin, driver.unpin, driver.bind)
                started = time.perf_counter()
                while pinning.share < 1:
                    if time.perf_counter() - started > PINNING_SECONDS:
                        raise RuntimeError("the segment was not pinned in time: see the log")
                    time.sleep(0.001)
                pinned = case.geometry.segment_bytes / (time.perf_counter() - started) / GiB
                addresses = (kv.data_ptr(), segment.address)
                ways = {"run by run": CudaCopies(driver, *addresses, pinning, None, 0)}
                ways["run by run"]._driver = _WithoutBatch(driver)  # type: ignore[assignment]
                if driver.has_batch_copy:
                    ways["batched"] = CudaCopies(driver, *addresses, pinning, None, 0)
                if gather is not None:
                    ways["gathered"] = CudaCopies(driver, *addresses, pinning, gather, 1 << 40)
                offer = CudaOffer(kv, lambda address, size: case.region)  # noqa: B023  used at once
                with (
                    worker_link("0", offer.offer, segment, case.slot) as link,
                    _by_torch(torch, kv, case, order, segment) as by_torch,
                ):
                    for direction, generation in ((Direction.STORE, 1), (Direction.LOAD, 2)):
                        write_headers(segment, case, generation)
                        named: dict[str, Callable[[], object]] = {
                            "cudaMemcpyAsync": _plain(torch, kv, case, direction),
                            **_vllm(torch, kv, case, direction),
                        }
                        for name, copies in ways.items():
                            named[name] = _bound(copies, direction, case)
                        named["block by block"] = by_torch(direction)
                        rows, handed = case.rows(generation), []
                        named["worker"] = lambda: handed.append(through(link, direction, rows, offer.mark))  # noqa: B023
                        speeds = gigabytes_per_second(case, named, rounds)
                        figures.append(
                            {
                                "model": model,
                                "layout": order,
                                "direction": direction.name.lower(),
                                "bytes": case.byte_count,
                                "mean_run_bytes": case.byte_count // case.runs.lengths.size,
                                "gigabytes_per_second": speeds,
                                "engine_thread_milliseconds": {"worker": statistics.median(handed) * 1e3},
                                "pinning_gibibytes_per_second": pinned,
                            }
                        )
                for copies in ways.values():
                    copies.close()
                pinning.undo()
    return figures


class _WithoutBatch:
    """The driver without what came with CUDA 12.8."""

    has_batch_copy = False

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def _bound(copies: Any, direction: Direction, case: Case) -> Callable[[], None]:
    method = copies.load if direction is Direction.LOAD else copies.store
    return lambda: method(case.runs)


def _plain(torch: Any, kv: Any, case: Case, direction: Direction) -> Callable[[], None]:
    """One copy of as many bytes, contiguous on both sides, from or to pinned memory."""
    host = torch.zeros(case.byte_count, dtype=torch.int8, pin_memory=True)
    device = kv[: case.byte_count]
    target, source = (device, host) if direction is Direction.LOAD else (host, device)

    def run() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return run


@contextmanager
def _by_torch(
    torch: Any, kv: Any, case: Case, order: str, segment: Segment
) -> Iterator[Callable[[Direction], Callable[[], None]]]:
    """What an engine's own process does without batches: tensor copies of torch, block by block."""
    from kvservice.connector.worker.block_copier import BlockCopier

    region = case.region
    layers, heads = len(region.layer_offsets), range(region.heads)
    sizes = {"l": layers, "b": region.block_count, "h": region.heads, "n": region.tokens}
    backing = kv.view(torch.bfloat16).view([*(sizes[name] for name in order), -1])
    layered = backing.permute([*(order.index(name) for name in "lbhn"), 4])
    block_copier = BlockCopier(list(layered.unbind(0)), heads)
    block_copier.bind(segment.buffer, case.slot)
    offsets = [case.geometry.payload_offset(slot, case.slot.payload_bytes) for slot in case.slots]

    def run(direction: Direction) -> None:
        for block, offset in zip(case.blocks, offsets, strict=True):
            if direction is Direction.LOAD:
                block_copier.load(offset, block)
            else:
                block_copier.store(block, offset)
        if kv.is_cuda:
            torch.cuda.synchronize()

    try:
        yield lambda direction: lambda: run(direction)
    finally:
        block_copier.unbind()  # the segment cannot be closed before


def _vllm(torch: Any, kv: Any, case: Case, direction: Direction) -> dict[str, Callable[[], object]]:
    """vLLM's offloading copy of the same blocks: whole pages of each layer, for layouts where a page is contiguous."""
    page = case.slot.layer_bytes
    if case.region.block_stride < page or case.region.token_stride * case.region.tokens > page:
        return {}
    try:
        from vllm.v1.simple_kv_offload import cuda_mem_ops
    except ImportError:
        return {}
    device, host = {}, {}
    backing = torch.zeros(case.region.region_bytes, dtype=torch.int8, pin_memory=True)
    for layer, offset in enumerate(case.region.layer_offsets):
        size, stride = (case.region.block_count, page), (case.region.block_stride, 1)
        device[str(layer)] = torch.as_strided(kv, size, stride, offset)
        host[str(layer)] = torch.as_strided(backing, size, stride, offset)
    stream = torch.cuda.Stream()
    source, target = (host, device) if direction is Direction.LOAD else (device, host)
    params = cuda_mem_ops.build_params(source, target, stream)

    def run() -> None:
        cuda_mem_ops.copy_blocks(case.blocks, case.blocks, params)
        stream.synchronize()

    return {"vLLM offloading": run}


def show(figures: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in figures for name in row["gigabytes_per_second"]))
    table = [
        [
            f"{row['model']} {row.get('layout', '')} {row['direction']}",
            *(row["gigabytes_per_second"].get(name, "-") for name in names),
            *(row["engine_thread_milliseconds"].get(name, "-") for name in ("in process", "worker")),
        ]
        for row in figures
    ]
    print_table(["GB/s", *names, "engine thread ms: in process", "worker"], table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="measure the memory of a CPU engine")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="after one that does not count; default %(default)s")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if not given.host and not is_present():
        print("no CUDA device: nothing measured (--host measures the same way of copying on a CPU engine's memory)")
        return 0
    figures = host_figures(given.rounds) if given.host else gpu_figures(given.rounds)
    show(figures)
    path = write_report("host_copies" if given.host else "gpu_copies", {"copies": figures}, given.out)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
