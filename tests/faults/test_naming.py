"""A block's name says what its bytes were computed with: checkpoints, adapters and prompt lengths that were once taken
for one another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvservice.connector.vllm.lora import CLOCK_SECONDS, Adapters, identity_of
from kvservice.connector.weights import weights_identity
from kvservice.testing.eventually import eventually

pytestmark = pytest.mark.faults


def checkpoint(folder: Path, change: int | None = None) -> Path:
    """64 MiB in one file, of which one matrix in the middle may be another."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.manual_seed(1)
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(512, 1024) for i in range(32)}
    if change is not None:
        tensors[f"model.layers.{change}.mlp.up_proj.weight"] *= 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("layer", [1, 16, 30])
def test_one_other_matrix_makes_another_checkpoint_name(tmp_path: Path, layer: int) -> None:
    cache = tmp_path / "cache"
    one, same, edited = (
        weights_identity(str(checkpoint(tmp_path / name, change)), None, None, cache)
        for name, change in (("one", None), ("same", None), ("edited", layer))
    )
    assert one == same
    assert one != edited


def train(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights * 1000)
    return folder


@contextmanager
def started_engine(*, files_stay: bool = False) -> Iterator[Adapters]:
    """Its connector is made before it loads any adapter."""
    adapters = Adapters(lambda path: Path(path), files_stay=files_stay)
    try:
        yield adapters
    finally:
        adapters.close()


def name_of(adapters: Adapters, path: Path, number: int = 1) -> bytes | None:
    """What its requests are named with, once its files have been looked at."""

    def answered() -> tuple[bytes | None] | None:
        found, known = adapters.of(str(path), number), adapters.counters
        is_refused = known["adapter_in_doubt"] or known["adapter_ambiguous"] or known["adapter_changed"]
        return (found,) if found is not None or is_refused else None

    return eventually(answered, "a name for the adapter, or the refusal to name it")[0]


def overwrite(latest: Path, tmp_path: Path) -> None:
    train(latest, b"version 2")


def move_into_place(latest: Path, tmp_path: Path) -> None:
    latest.rename(tmp_path / "old")
    (tmp_path / "prepared").rename(latest)


def turn_the_link(latest: Path, tmp_path: Path) -> None:
    link = tmp_path / "link to version 2"
    link.symlink_to(tmp_path / "prepared")
    link.replace(latest)


@pytest.mark.parametrize(("linked", "publish"), [(False, overwrite), (False, move_into_place), (True, turn_the_link)])
def test_an_adapter_trained_again_is_not_named_by_its_new_files(
    tmp_path: Path, linked: bool, publish: Callable[[Path, Path], None]
) -> None:
    """The engine has loaded version 1 at its start. What lies there at the first request is version 2, however it came
    there and however old its files are."""
    train(tmp_path / "prepared", b"version 2")
    latest = tmp_path / "latest"
    if linked:
        latest.symlink_to(train(tmp_path / "version 1", b"version 1"))
    else:
        train(latest, b"version 1")
    time.sleep(CLOCK_SECONDS + 0.1)
    with started_engine() as unchanged:
        assert name_of(unchanged, latest) == identity_of(latest), "files from before the engine are what it loads"
    with started_engine() as adapters:
        time.sleep(CLOCK_SECONDS + 0.1)
        publish(latest, tmp_path)
        assert name_of(adapters, latest) is None
        assert adapters.counters["adapter_in_doubt"] == 1


def test_an_adapter_of_another_path_with_its_number_is_unnamed(tmp_path: Path) -> None:
    """vLLM finds a loaded adapter by its number, and goes on with what it has whatever path a request gives."""
    one, other = train(tmp_path / "one", b"version 1"), train(tmp_path / "other", b"version 2")
    with started_engine(files_stay=True) as adapters:
        assert name_of(adapters, one) == identity_of(one)
        assert name_of(adapters, other) is None
        assert name_of(adapters, one) is None, "it may be the other one by now"
