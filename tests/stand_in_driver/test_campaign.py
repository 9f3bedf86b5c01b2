"""The campaign for a GPU machine, as far as it goes without one: every stage ends with its line, and what needs no
kernel of torch's runs on the stand-in. Without what such a machine lacks: gRPC, Ray, vLLM, NIXL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.engine import BEAMS, EVERYWHERE, OVER_A_SHARD, PREEMPTED
from benchmarks.gpu.findings import FAILED, VARIABLE
from tests.stand_in_driver.build import ROOT

LACKING = """
import sys

LACKED = {"grpc", "google", "ray", "vllm", "nixl", "nixl_cu12", "nixl_cu13", "prometheus_client"}

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in LACKED:
            raise ModuleNotFoundError(f"this machine lacks {name}", name=name)

sys.meta_path.insert(0, Lacking())
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes that find nothing else than such a machine has."""
    folder = tmp_path_factory.mktemp("lacking")
    (folder / "sitecustomize.py").write_text(LACKING)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.fixture(scope="module")
def documents(library_path: str, bare: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of both parts on the stand-in."""
    out = tmp_path_factory.mktemp("campaign")
    command = [sys.executable, "-m", "benchmarks.gpu", "--driver", "stand-in", "--out", str(out)]
    done = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=250)
    logs = "".join(path.read_text()[-2000:] for path in out.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    page = (out / "page.md").read_text()
    assert "## Part 1" in page and "## Part 2" in page
    return [json.loads((out / f"part{part}.json").read_text()) for part in sorted(PARTS)]


def stage(module: str, *arguments: str, environment: dict[str, str], findings: Path) -> dict[str, Any]:
    """What it found, without a driver."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments]
    wanted = {**environment, VARIABLE: str(findings), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=wanted, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {one["what"]: one["value"] for one in map(json.loads, findings.read_text().splitlines())}
    if failed := {name: value[FAILED] for name, value in found.items() if isinstance(value, dict) and FAILED in value}:
        pytest.fail(json.dumps(failed, indent=2) + done.stdout[-2000:] + done.stderr[-2000:])
    return found


class StageEnd(BaseModel, extra="forbid", strict=True):
    how: Literal["ok", "skipped", "failed"]
    line: str
    seconds: float


class Figures(BaseModel, extra="forbid", strict=True):
    driver: Literal["cuda", "stand-in"]
    part: Literal[1, 2]
    skipped: int
    stages: dict[str, StageEnd]
    findings: dict[str, dict[str, Any]]


class Document(BaseModel, extra="forbid", strict=True):
    """What both drivers write."""

    benchmark: Literal["gpu/part1", "gpu/part2"]
    command: str
    commit: str
    date: str
    machine: dict[str, Any]
    figures: Figures


def test_the_gpu_campaign_needs_only_what_such_a_machine_has(bare: dict[str, str]) -> None:
    modules = ["tests.gpu.test_copies", "tests.gpu.test_direct", "tests.gpu.test_worker", "benchmarks.gpu_copies"]
    command = [sys.executable, "-c", f"import kvservice.cli.main, kvservice.copying.process, {', '.join(modules)}"]
    done = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-1000:]


def test_without_a_gpu_one_line_says_what_is_missing(bare: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=250)
    [said] = done.stdout.splitlines()
    assert done.returncode == 0 and "there is no CUDA driver here" in said
    assert f"{len(PARTS[1])} stages skipped" in said and list(tmp_path.iterdir()) == []


def test_results_on_the_stand_in_have_the_form_of_a_gpus(documents: list[Any]) -> None:
    for part, document in enumerate(documents, 1):
        figures = Document.model_validate(document).figures
        assert (figures.driver, figures.part) == ("stand-in", part)
        assert list(figures.stages) == [planned.name for planned in PARTS[part]]
        runs = {planned.name for planned in PARTS[part] if planned.on_stand_in is not None}
        assert {name for name, end in figures.stages.items() if end.how == "ok"} == runs == set(figures.findings)
        assert figures.skipped == len(figures.stages) - len(runs)


def test_probe_finds_what_the_product_relies_on(documents: list[Any]) -> None:
    found = documents[0]["figures"]["findings"]["probe"]
    assert found["batched copies"] is True
    for way in ("IPC", "IPC, the other process is killed"):
        read = found[way]
        assert (read["bytes are read"], read["event passes"], read["close"]) == (True, True, None), found
        assert read["same address when opened twice"]
    assert "201" in found["own handle"]
    assert "712" in found["pinning /dev/shm"]["pinned again"]


def test_copies_measures_every_way(documents: list[Any]) -> None:
    found = documents[0]["figures"]["findings"]["copies"]
    assert found["bytes come back as they were"] is True
    for size in (4, 64):
        for way in ("load", "store", "direct"):
            assert found[f"{way} {size} KiB runs, batch"]["GB/s"] >= 0
        assert f"load {size} KiB runs, batch to another process's memory" in found
    for way in ("host to device", "device to host", "pageable host to device", "device to pageable host"):
        assert found[f"one copy, {way}"]["GB/s"] >= 0


def test_copying_half_of_interference_copies(documents: list[Any]) -> None:
    found = documents[0]["figures"]["findings"]["interference"]
    assert found["load"]["bytes"] > 0 and found["store"]["bytes"] > 0


def test_first_token_is_the_same_computed_and_loaded(bare: dict[str, str], tmp_path: Path) -> None:
    found = stage("first_token", "--cpu", environment=bare, findings=tmp_path / "findings")
    assert [one["same token"] for name, one in found.items() if name.startswith("prompt")] == [True, True]


@pytest.mark.slow
def test_engine_says_the_same_in_each_mode(tmp_path: Path) -> None:
    pytest.importorskip("kvservice.engine.loop", reason="the reference engine has no loop yet")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = stage("engine", "--cpu", environment=environment, findings=tmp_path / "findings")
    assert {name.split(", ")[-1] for name in found} == set(EVERYWHERE | PREEMPTED | BEAMS | OVER_A_SHARD)


def test_tokens_are_the_same_after_a_way_through_the_pool(bare: dict[str, str], tmp_path: Path) -> None:
    found = stage("equality", "--cpu", environment=bare, findings=tmp_path / "findings")
    layouts = [value for name, value in found.items() if name.startswith("layout")]
    assert len(layouts) == 1
    assert all(one["same cache"] and one["same tokens"] and one["different tokens"] > 1 for one in layouts)
