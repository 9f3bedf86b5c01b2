"""Which copier an engine's device gets, by devices that torch only names: no GPU of any kind is here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvservice.connector.options import CopierChoice
from kvservice.connector.worker import copier as copier_module
from kvservice.connector.worker.copier import CudaCopier, HostCopier, InlineCopier, in_process_copier
from kvservice.connector.worker.devices import check_device
from kvservice.connector.worker.remote_copier import copier_for
from kvservice.errors import Unavailable, UnsupportedDevice


def engine_on(kind: str) -> Any:
    return SimpleNamespace(device=torch.device(kind))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))


@pytest.mark.parametrize(("kind", "name"), [("xpu", "Intel GPU (XPU)"), ("hpu", "Intel Gaudi (HPU)")])
def test_device_without_copies_is_refused_by_name(kind: str, name: str) -> None:
    with pytest.raises(UnsupportedDevice) as refused:
        in_process_copier(engine_on(kind))
    assert name in refused.value.message and "CPU, CUDA or ROCm" in refused.value.message
    assert refused.value.attributes["device"] == kind


def test_rocm_copies_through_torch_and_asks_for_no_cuda(monkeypatch: pytest.MonkeyPatch, streams: None) -> None:
    """Its torch calls the device cuda."""
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    monkeypatch.setattr(copier_module, "Driver", None)  # asking it would fail
    found = in_process_copier(engine_on("cuda"))
    assert isinstance(found, CudaCopier) and found._driver is None


def test_rocm_without_a_copy_worker_copies_in_process(
    monkeypatch: pytest.MonkeyPatch, streams: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    found = copier_for(CopierChoice.WORKER, engine_on("cuda"), [], range(2), None)
    assert isinstance(found, CudaCopier) and found.counters["copy_worker_not_shared"] == 1
    assert "a copy worker needs CUDA, and this engine runs on ROCm" in caplog.text


@pytest.mark.parametrize("has_batch", [True, False])
def test_cuda_copies_by_batches_where_the_driver_has_them(
    monkeypatch: pytest.MonkeyPatch, streams: None, has_batch: bool
) -> None:
    driver = SimpleNamespace(has_batch_copy=has_batch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(copier_module, "Driver", SimpleNamespace(of_device=lambda name: driver))
    found = in_process_copier(engine_on("cuda"))
    assert isinstance(found, CudaCopier) and found._driver is (driver if has_batch else None)


def test_cuda_without_its_driver_copies_through_torch(monkeypatch: pytest.MonkeyPatch, streams: None) -> None:
    def missing(name: str) -> None:
        raise Unavailable("there is no CUDA driver here")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(copier_module, "Driver", SimpleNamespace(of_device=missing))
    found = in_process_copier(engine_on("cuda"))
    assert isinstance(found, CudaCopier) and found._driver is None


@pytest.mark.parametrize(("kind", "copier"), [("cpu", HostCopier), ("meta", InlineCopier)])
def test_other_devices_are_copied_through_their_tensors(kind: str, copier: type) -> None:
    check_device(kind)
    assert type(in_process_copier(engine_on(kind))) is copier
