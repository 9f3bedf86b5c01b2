"""When the demo has a network of its own, and what it says of how blocks crossed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.network import Crossing, why_not
from kvservice.transfer.nixl import nixl_available

ROOT = Path(__file__).parents[3]
MiB = 1024 * 1024
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
needs_nixl = pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
ASKS = """
import os, sys
from examples.demo.network import why_not
if sys.argv[1] == "stranger":
    os.seteuid(65534)
print(why_not("/"))
"""


def answer(who: str, *before: str, **environment: str) -> str:
    done = subprocess.run(
        [*before, sys.executable, "-c", ASKS, who],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_model_of_the_hub_needs_the_machine_s_own_network() -> None:
    assert "hub" in str(why_not("HuggingFaceTB/SmolLM2-135M-Instruct"))


@pytest.mark.processes
@needs_root
@needs_nixl
def test_a_user_without_the_right_is_told_which_one() -> None:
    assert answer("stranger") == "network namespaces need root"


@pytest.mark.processes
@needs_root
@needs_nixl
def test_root_that_may_not_is_told_what_the_kernel_says() -> None:
    assert "does not permit" in answer("root", "setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")


@pytest.mark.processes
@needs_root
@needs_nixl
def test_missing_programs_are_named(tmp_path: Path) -> None:
    assert "ip, mount, nsenter, setpriv, sh, unshare" in answer("root", PATH=str(tmp_path))


@pytest.mark.processes
@needs_root
@needs_nixl
def test_the_trial_leaves_no_device_and_no_network_behind() -> None:
    def seen() -> tuple[str, list[str]]:
        devices = [line.partition(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()]
        return str(Path("/proc/self/ns/net").readlink()), devices

    before = seen()
    why_not("/")
    assert seen() == before


def test_the_sentence_says_what_was_used() -> None:
    with_network = Crossing("nixl", 187 * MiB, "").sentence
    assert "NIXL over a network between two namespaces" in with_network
    assert "187.0 MiB went over the link" in with_network
    without = Crossing("shm", None, "network namespaces need root").sentence
    assert "shared memory" in without
    assert "network namespaces need root" in without
    assert "NIXL" not in without
