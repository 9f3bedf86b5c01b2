"""Which ways of spreading or extending a model are stored, and that the others are refused by name.

Layouts of vLLM in which the layers of a block lie together are in test_layouts.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config import ECTransferConfig, SpeculativeConfig
from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

from kvservice.connector.options import ConnectorOptions
from kvservice.connector.vllm import compat
from kvservice.errors import UnsupportedLayout
from tests.unit.connector.vllm.test_connector import cache_config, model, vllm_config

__all__ = ["model"]  # a fixture

# Methods of speculative decoding whose drafts keep nothing beside the model's own blocks.
NO_DRAFT_LAYERS = frozenset({"ngram", "ngram_gpu", "medusa", "mlp_speculator", "suffix", "custom_class"})


class Draft(SimpleNamespace):
    """A draft of one method, asked as vLLM's own configuration is."""

    use_eagle = SpeculativeConfig.use_eagle
    uses_draft_model = SpeculativeConfig.uses_draft_model
    uses_extract_hidden_states = SpeculativeConfig.uses_extract_hidden_states


def refused(model: Path, **changes: Any) -> str:
    with pytest.raises(UnsupportedLayout) as found:
        compat.engine_spec(vllm_config(model, {}, **changes), cache_config(), ConnectorOptions())
    return found.value.message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pipeline_parallel_size", "(pipeline_parallel_size is 2): a slot holds all layers"),
        ("decode_context_parallel_size", "(decode_context_parallel_size is 2): the tokens of a block lie on several"),
        ("prefill_context_parallel_size", "(prefill_context_parallel_size is 2): the tokens of a block lie on several"),
    ],
)
def test_stages_and_context_parallelism_are_refused_by_name(model: Path, name: str, says: str) -> None:
    assert says in refused(model, **{f"parallel_config__{name}": 2})


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_draft_layers_are_refused_by_their_method(model: Path, method: str) -> None:
    assert f"(EAGLE, MTP and the like, here '{method}')" in refused(model, speculative_config=Draft(method=method))


def test_hidden_states_among_the_blocks_are_refused(model: Path) -> None:
    config = Draft(method="extract_hidden_states")
    assert "(speculative method 'extract_hidden_states')" in refused(model, speculative_config=config)


def test_every_method_of_speculation_was_decided_about(model: Path) -> None:
    """A method that a new vLLM adds is neither stored nor refused before somebody has looked at it."""
    fine = []
    for method in _methods(SpeculativeMethod) - set(get_args(MTPModelTypes)):  # vLLM calls all of these "mtp"
        draft = Draft(method=method)
        if not draft.use_eagle() and not draft.uses_extract_hidden_states() and not draft.uses_draft_model():
            fine.append(method)
            compat.engine_spec(vllm_config(model, {}, speculative_config=draft), cache_config(), ConnectorOptions())
    assert set(fine) <= NO_DRAFT_LAYERS, "look at what these keep in the KV cache"


def _methods(alias: Any) -> set[str]:
    """The names in a literal type, or in a union of them."""
    return {name for part in get_args(alias) for name in ([part] if isinstance(part, str) else _methods(part))}


@pytest.mark.parametrize("role", ["ec_consumer", "ec_both"])
def test_encoder_caches_beside_it_change_nothing(model: Path, role: Any) -> None:
    """What an encoder made is no KV, and vLLM's hash of a block covers the images in it."""
    transfer = ECTransferConfig(ec_connector="ECExampleConnector", ec_role=role)
    alone = compat.engine_spec(vllm_config(model, {}), cache_config(), ConnectorOptions())
    beside = compat.engine_spec(vllm_config(model, {}, ec_transfer_config=transfer), cache_config(), ConnectorOptions())
    assert beside == alone


def test_engine_that_only_encodes_is_refused_by_name(model: Path) -> None:
    transfer = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_producer")
    assert "only encodes images or sound for others" in refused(model, ec_transfer_config=transfer)
