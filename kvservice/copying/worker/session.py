"""One engine as its copy worker sees it: the connection, the imported KV memory, the segment, a lane per direction.

A thread of its own reads the connection; the lanes' threads copy and answer. BYE is sent and the connection closed only
after all lanes have ended and the engine's memory is closed. An engine that sees BYE knows that nothing is copied for
it any more, and the next engine finds the GPU memory free.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvservice.copying.copies import CopyEngine
from kvservice.copying.device import Device, KVMemory, Segments
from kvservice.copying.message import (
    MESSAGE_BYTES_MAX,
    NO_EVENT,
    VERSION,
    CopyOutcome,
    Direction,
    Ended,
    Kind,
    kind_of,
    number,
    pack_done,
    pack_json,
    pack_lent,
    parse_copies,
    parse_json,
    parse_lent,
    parse_pool,
)
from kvservice.copying.worker.lanes import CopyLane, Target
from kvservice.copying.worker.loans import DirectPath, Lender, Loans
from kvservice.core.segment.copy_runs import CopyTemplate, RegionLayout
from kvservice.errors import InvalidRequest, KVServiceError, another_version
from kvservice.memory.liveness import LivenessLock, hold
from kvservice.memory.segment import Segment

log = logging.getLogger("kvservice.copying")

SEND_SECONDS = 5.0  # If an engine does not read its answers for this long, its session ends.
DESCRIPTORS_MAX = 4  # Files that one message may carry; a HELLO carries one. Further ones are closed by the kernel.


class EngineSession:
    def __init__(
        self,
        connection: socket.socket,
        device: Device,
        segments: Segments,
        loans: Loans,
        on_end: Callable[[EngineSession], None],
    ) -> None:
        """Raises RuntimeError, with the connection closed, when the system starts no more threads."""
        self._connection = connection
        self._device = device
        self._segments = segments
        self._loans = loans
        self._on_end = on_end
        self._send_lock = threading.Lock()
        self._kv: KVMemory | None = None
        self._region: RegionLayout | None = None
        self._segment: Segment | None = None
        self._engine: CopyEngine | None = None
        self._target: Target | None = None
        self._direct: DirectPath | None = None
        self._lock: LivenessLock | None = None
        self._lends_only = False  # an engine of another device: its blocks are read here, but nothing is copied for it
        self.lanes: dict[Direction, CopyLane] = {}
        connection.settimeout(None)
        self._thread = threading.Thread(target=self._serve, name="kvservice-copy-engine", daemon=True)
        try:
            for direction in Direction:
                self.lanes[direction] = CopyLane(f"kvservice-{direction.name.lower()}", self._ended)
            self._thread.start()
        except RuntimeError:
            for lane in self.lanes.values():
                lane.stop()
            connection.close()
            raise

    def close(self) -> None:
        """End the connection. Blocks until nothing is copied for this engine any more."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the connection's thread ----

    def _serve(self) -> None:
        try:
            while True:
                data, descriptors, flags, _ = socket.recv_fds(
                    self._connection, MESSAGE_BYTES_MAX + 1, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
                if not data:
                    break
                if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    _close_all(descriptors)
                    raise InvalidRequest("a message is longer than allowed")
                self._handle(data, descriptors)
        except OSError as error:
            log.info("engine connection lost: %s", error)
        except KVServiceError as error:
            log.error("engine connection ended: %s", error.message)
        except Exception:  # trouble with one engine must not reach the others
            log.exception("engine connection ended")
        finally:
            self._end()

    def _handle(self, data: bytes, descriptors: list[int]) -> None:
        try:
            kind = kind_of(data)
            fields = parse_json(data) if kind in (Kind.HELLO, Kind.POOL) else {}
        except InvalidRequest:
            _close_all(descriptors)
            raise
        if kind is Kind.HELLO:
            self._answer({"to": "hello"}, lambda: self._hello(fields, descriptors))
            return
        _close_all(descriptors)
        if kind is Kind.POOL:
            self._answer({"to": "pool", "pool_id": number(fields, "pool_id")}, lambda: self._use(fields))
        elif kind is Kind.LEAVE:
            self._leave()
        elif kind is Kind.COPIES:
            self._copies(data)
        elif kind is Kind.LEND:
            self._lend(data)
        elif kind is Kind.RECALL:
            self._recall(*parse_lent(data))
        else:
            raise InvalidRequest(f"an engine does not send {kind.name}")

    def _answer(self, fields: dict[str, Any], attempt: Callable[[], None]) -> None:
        error: dict[str, str] | None = None
        try:
            attempt()
        except KVServiceError as problem:
            log.error("refused %s: %s", fields["to"], problem.message)
            error = {"reason": problem.reason, "message": problem.message}
        except OSError as problem:
            error = {"reason": "SEGMENT", "message": str(problem)}
        self._send(pack_json(Kind.ANSWER, {**fields, "error": error}))

    def _hello(self, fields: dict[str, Any], descriptors: list[int]) -> None:
        taken = False
        try:
            if fields.get("version") != VERSION:
                raise another_version("the engine's link to its copy worker", fields.get("version"), VERSION)
            self._lends_only = fields.get("lends_only") is True
            if fields.get("device") != self._device.name and not self._lends_only:
                raise InvalidRequest(f"this worker serves {self._device.name}, not {fields.get('device')}")
            memory, layout = fields.get("memory"), fields.get("layout")
            if self._kv is not None or not isinstance(memory, dict) or not isinstance(layout, dict):
                raise InvalidRequest("an engine sends HELLO once, with its memory and layout")
            region = RegionLayout.of(layout)
            taken = True
            self._kv, self._region = self._device.import_kv(memory, descriptors, region), region
        finally:
            if not taken:
                _close_all(descriptors)

    def _use(self, fields: dict[str, Any]) -> None:
        pool = parse_pool(fields)
        self._leave()
        if self._kv is None or self._region is None:
            raise InvalidRequest("an engine must send HELLO first")
        template = CopyTemplate(self._region, pool.slot)
        if self._lends_only:
            self._direct = DirectPath(self._loans, self._device, Lender(self._kv, template))
            return
        try:
            self._segment = self._segments.take(pool.segment_path, pool.geometry, pool.epoch)
            # The shard must not take slots back from an engine that is gone while this process may still write them.
            self._lock = hold(self._segment, pool.engine_id, pool.epoch)
            self._engine = self._device.copies(self._kv, self._segment)
        except BaseException:
            self._leave()
            raise
        self._direct = DirectPath(self._loans, self._device, Lender(self._kv, template))
        self._target = Target(self._segment, pool.epoch, template, self._engine, self._direct)

    def _leave(self) -> None:
        self._target = None
        for lane in self.lanes.values():
            lane.drain()
        direct, self._direct = self._direct, None
        engine, self._engine = self._engine, None
        lock, self._lock = self._lock, None
        segment, self._segment = self._segment, None
        with contextlib.ExitStack() as rest:  # from the last to the first, whatever fails of it
            if segment is not None:
                rest.callback(self._segments.give, segment)
            if lock is not None:  # unlock before the memory is closed: nothing is written any more
                rest.callback(lock.release)
            if engine is not None:
                rest.callback(engine.close)
            if direct is not None:
                rest.callback(direct.close)
                rest.callback(self._loans.drop, direct.reader)  # it is a lender too

    def _copies(self, data: bytes) -> None:
        jobs, event = parse_copies(data)
        kv = self._kv
        for job in jobs:
            if kv is None or event == NO_EVENT:
                self.lanes[job.direction].submit(self._target, job)
            else:
                self.lanes[job.direction].submit(self._target, job, partial(kv.wait_for, event))

    def _lend(self, data: bytes) -> None:
        jobs, event = parse_copies(data)
        for job in jobs:
            if self._direct is not None:  # without a pool nothing is lent
                blocks = job.rows["block"].tolist()
                if max(blocks, default=0) >= self._direct.reader.template.region.block_count:
                    raise InvalidRequest(f"block {max(blocks)} cannot be lent: the engine has no such block")
                lent = list(zip((key.tobytes() for key in job.rows["key"]), blocks, strict=True))
                self._loans.lend(self._direct.reader, job.job_id, lent, event, partial(self._taken, job.job_id))
            self._ended(Ended(job.job_id, CopyOutcome.COPIED, 0))

    def _recall(self, job_id: int, lend_id: int) -> None:
        done = partial(self._ended, Ended(job_id, CopyOutcome.COPIED, 0))
        if self._direct is None:
            done()  # all loans ended with the pool
        else:
            self._loans.recall(self._direct.reader, lend_id, done)

    def _end(self) -> None:
        for lane in self.lanes.values():
            lane.stop()
        try:
            try:
                self._leave()
            finally:
                if self._kv is not None:
                    self._kv.close()
        except Exception:  # whatever stays open, nothing is copied any more, and the engine must be told
            log.exception("engine left")
        finally:
            self._send(pack_json(Kind.BYE, {}))
            self._connection.close()
            self._on_end(self)

    # -- any thread ----

    def _ended(self, ended: Ended) -> None:
        self._send(pack_done([ended]))

    def _taken(self, lend_id: int) -> None:
        self._send(pack_lent(Kind.TAKEN, lend_id))

    def _send(self, data: bytes) -> None:
        with self._send_lock:
            try:
                self._connection.send(data)
            except OSError:  # the engine is gone or has not read for too long; the reading thread ends the session
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RD)  # only this direction: BYE must still go out


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
