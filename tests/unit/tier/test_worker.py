"""Rules of tier.worker: order, refusals, and an end that answers everything."""

from __future__ import annotations

import os
import threading

import pytest

from kvservice.testing.eventually import eventually
from kvservice.tier import worker as worker_module
from kvservice.tier.worker import TierWorker, Urgency


class Gate:
    """A piece of work that runs until `open` is set."""

    def __init__(self, worker: TierWorker, urgency: Urgency = Urgency.URGENT_READ) -> None:
        self.began, self.open = threading.Event(), threading.Event()
        assert worker.submit(urgency, self._run, lambda: None)

    def _run(self) -> None:
        self.began.set()
        self.open.wait(30)


def test_several_threads_work_side_by_side() -> None:
    worker = TierWorker("disk", threads=3, writes_max=1)
    gates = [Gate(worker) for _ in range(3)]
    assert all(gate.began.wait(10) for gate in gates)
    for gate in gates:
        gate.open.set()
    assert worker.close()


def test_its_threads_let_others_run_first() -> None:
    worker, found = TierWorker("disk", threads=1, writes_max=1), list[int]()
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    worker.submit(
        Urgency.READ, lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())), lambda: None
    )
    eventually(lambda: found, "the work")
    assert worker.close()
    assert found == [min(19, mine + worker_module.NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_close_drops_what_waits_and_waits_for_what_runs() -> None:
    worker = TierWorker("disk", threads=1, writes_max=10)
    gate, said = Gate(worker), list[str]()
    assert gate.began.wait(10)
    for urgency in Urgency:
        worker.submit(urgency, lambda: said.append("done"), lambda: said.append("dropped"))
    assert worker.waiting() == 4
    closing = threading.Thread(target=worker.close)
    closing.start()
    eventually(lambda: len(said) == 4, "what waits", detail=lambda: said)
    assert said == ["dropped"] * 4 and closing.is_alive(), "one piece still runs"
    gate.open.set()
    closing.join(10)
    assert not closing.is_alive()
    assert not worker.submit(Urgency.ERASE, lambda: said.append("late"), lambda: None)
    assert worker.close() and said == ["dropped"] * 4


def test_close_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A thread that hangs in a device's driver is left behind, and named in the log."""
    monkeypatch.setattr(worker_module, "CLOSE_SECONDS", 0.05)
    worker = TierWorker("disk", threads=2, writes_max=1)
    gate = Gate(worker)
    assert gate.began.wait(10)
    assert not worker.close()
    assert "tier_hangs_at_its_end" in caplog.text
    gate.open.set()
    assert worker.close()
