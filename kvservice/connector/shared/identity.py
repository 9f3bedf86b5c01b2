"""What an engine says of itself if it shares pages with engines of other kinds: the same words as each of them.

The model's configuration is read from its file, not from an engine: engines complete it with defaults of their own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from kvservice.connector.weights import downloaded, weights_identity
from kvservice.core.block.pages import SharedModel
from kvservice.core.messages import EngineSpec
from kvservice.errors import UnsupportedLayout

CONFIG_FILE = "config.json"
CONFIG_BYTES_MAX = 4 << 20  # a model's configuration has some kilobytes; a larger file is none


def read_config(model: str, revision: str | None) -> dict[str, object]:
    """The configuration of a model in a folder, or of a hub's model as it was downloaded. Uses no network. Raises
    UnsupportedLayout if there is none."""
    folder = Path(model) if Path(model).is_dir() else downloaded(model, revision)
    try:
        if folder is not None and (path := folder / CONFIG_FILE).stat().st_size <= CONFIG_BYTES_MAX:
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
    except (OSError, ValueError) as error:
        raise UnsupportedLayout(f"the configuration of {model} cannot be read: {error}") from error
    raise UnsupportedLayout(f"{model} has no {CONFIG_FILE} to say how its K and V are computed; share needs it")


def shared_model(
    model: str,
    *,
    dtype: str,
    layer_count: int,
    kv_head_count: int,
    head_size: int,
    revision: str | None = None,
    commit: str | None,
    weights: str | None,
    weights_cache: Path | None,
    accepts: str,
) -> SharedModel:
    """Args:
        model: a folder, or the name of a hub's model.
        dtype: of the KV cache, as torch calls it.
        weights: their name, if their files need not be read. All engines that share must say the same.
        accepts: a lossy codec that tiers may use.

    May read all files of the model, which takes minutes. Raises UnsupportedLayout that names what is not shared, and
    UnnamedWeights.
    """
    return SharedModel(
        weights or weights_identity(model, revision, commit, weights_cache),
        dtype.removeprefix("torch."),
        layer_count,
        kv_head_count,
        head_size,
        read_config(model, revision),
        accepts,
    )


def sharing(spec: EngineSpec, model: SharedModel) -> EngineSpec:
    """The engine's identity towards the pool when it shares pages. No block of the exact kind has a name in common with
    it."""
    return replace(
        spec,
        model=shared_name(spec.model),
        fingerprint=model.fingerprint.within(spec.namespace),
        layout=model.layout,
        window_groups=(),
        hears_removals=False,
    )


def shared_name(model: str) -> str:
    """What a model is called whose pages are shared. A shard refuses a second engine of one name that differs from the
    first, and exact and sharing engines may be attached side by side."""
    return f"{model} (shared)"
