"""The campaign for a GPU machine, as far as it goes without one: every stage ends with its line, and what needs no
kernel of torch's runs on the stand-in. Without what such a machine lacks: gRPC, Ray, vLLM, NIXL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.findings import FAILED, SKIPPED, VARIABLE
from tests.stand_in_driver.build import ROOT
from tests.stand_in_driver.engine import stand_in_environment

LACKING = """
import sys

LACKED = {"grpc", "google", "ray", "vllm", "nixl", "nixl_cu12", "nixl_cu13", "prometheus_client"}

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in LACKED:
            raise ModuleNotFoundError(f"this machine lacks {name}", name=name)

sys.meta_path.insert(0, Lacking())
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that find nothing else than such a machine has."""
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "sitecustomize.py").write_text(LACKING)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "lacking"), str(ROOT)])}


def stage(module: str, *arguments: str, environment: dict[str, str], findings: Path) -> dict[str, Any]:
    """What it found, on the stand-in."""
    on_stand_in = {**environment, "LD_LIBRARY_PATH": stand_in_environment()["LD_LIBRARY_PATH"], VARIABLE: str(findings)}
    on_stand_in["STAND_IN_DELAY_US"] = "10"
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments]
    done = subprocess.run(command, env=on_stand_in, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {one["what"]: one["value"] for one in map(json.loads, findings.read_text().splitlines())}
    assert not [name for name, value in found.items() if isinstance(value, dict) and FAILED in value], found
    return found


def test_the_gpu_campaign_needs_only_what_such_a_machine_has(bare: dict[str, str]) -> None:
    modules = ["tests.gpu.test_copies", "tests.gpu.test_direct", "tests.gpu.test_worker", "benchmarks.gpu_copies"]
    command = [sys.executable, "-c", f"import kvservice.cli.main, kvservice.copying.process, {', '.join(modules)}"]
    done = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_stage_ends_with_its_line_where_there_is_no_gpu(part: int, bare: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", str(part), "--out", str(tmp_path)]
    done = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=250)
    said = done.stdout.splitlines()
    if "failed" in done.stdout or done.returncode != SKIPPED:
        pytest.fail(done.stdout + done.stderr)
    assert [line.split(":")[0] for line in said[:-1]] == [planned.name for planned in PARTS[part]]
    assert all("skipped: there is no CUDA driver here" in line for line in said[:-1])
    assert said[-1].startswith("no GPU here, nothing was measured")


def test_probe_finds_what_the_product_relies_on(library_path: str, bare: dict[str, str], tmp_path: Path) -> None:
    found = stage("probe", environment=bare, findings=tmp_path / "findings")
    assert found["batched copies"] is True
    for way in ("IPC", "IPC, the other process is killed"):
        read = found[way]
        assert (read["bytes are read"], read["event passes"], read["close"]) == (True, True, None), found
        assert read["same address when opened twice"]
    assert "201" in found["own handle"]
    assert "712" in found["pinning /dev/shm"]["pinned again"]


def test_copies_measures_every_way(library_path: str, bare: dict[str, str], tmp_path: Path) -> None:
    found = stage("copies", "--small", environment=bare, findings=tmp_path / "findings")
    assert found["bytes come back as they were"] is True
    for size in (4, 64):
        for way in ("load", "store", "direct"):
            assert found[f"{way} {size} KiB runs, batch"]["GB/s"] >= 0
        assert f"load {size} KiB runs, batch to another process's memory" in found


@pytest.mark.parametrize("way", ["load", "store"])
def test_copying_half_of_interference_copies(library_path: str, bare: dict[str, str], tmp_path: Path, way: str) -> None:
    assert stage("interference", "--try", way, environment=bare, findings=tmp_path / "findings")[way]["bytes"] > 0


def test_tokens_are_the_same_after_a_way_through_the_pool(bare: dict[str, str], tmp_path: Path) -> None:
    found = stage("equality", "--cpu", environment=bare, findings=tmp_path / "findings")
    layouts = [value for name, value in found.items() if name.startswith("layout")]
    assert len(layouts) == 1
    assert all(one["same cache"] and one["same tokens"] and one["different tokens"] > 1 for one in layouts)
