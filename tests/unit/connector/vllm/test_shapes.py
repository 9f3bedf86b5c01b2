"""Which ways of spreading or extending a model are stored, and that the others are refused by name.

Layouts of vLLM in which the layers of a block lie together are in test_layouts.
"""

from __future__ import annotations

import sys
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config import ECTransferConfig, SpeculativeConfig, VllmConfig
from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

from kvservice.connector.options import ConnectorOptions, Offload
from kvservice.connector.vllm import compat
from kvservice.connector.vllm.block_hashes import block_namer
from kvservice.connector.vllm.draft_layers import drafted_tokens
from kvservice.errors import ConfigError, UnsupportedLayout
from tests.unit.connector.vllm.test_connector import (
    BLOCK,
    FULL,
    WINDOW,
    HfConfig,
    cache_config,
    model,
    vllm_config,
)

__all__ = ["model"]  # a fixture

# Methods of speculative decoding whose drafts keep nothing beside the model's own blocks.
NO_DRAFT_LAYERS = frozenset({"ngram", "ngram_gpu", "medusa", "mlp_speculator", "suffix", "custom_class"})


class Draft(SimpleNamespace):
    """A draft of one method, asked as vLLM's own configuration is."""

    use_eagle = SpeculativeConfig.use_eagle
    uses_draft_model = SpeculativeConfig.uses_draft_model
    uses_extract_hidden_states = SpeculativeConfig.uses_extract_hidden_states
    use_multi_module_mtp = SpeculativeConfig.use_multi_module_mtp


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


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_draft_layers_are_refused_by_their_method(model: Path, method: str) -> None:
    assert f"draft layers of the method '{method}'" in refused(model, speculative_config=Draft(method=method))


def test_draft_layers_are_part_of_the_identity(model: Path) -> None:
    """Also beside a draft model of the same files, whose blocks have other names."""
    found = [
        engine_fields(model, speculative_config=draft_of(model, method))
        for method in ("eagle", "eagle3", "mtp", "draft_model")
    ]
    assert [fields.get("draft_layers") for fields in found] == ["eagle", "eagle3", "mtp", None]
    assert all(fields["draft"] and "draft.hf.hidden_size" in fields for fields in found)


def test_name_of_the_weights_is_also_of_the_mtp_in_them(model: Path) -> None:
    options = ConnectorOptions(weights_version="first")
    fields = engine_fields(model, options, speculative_config=draft_of(model, "mtp"))
    assert fields["draft"] == fields["weights"] == options.weights_name()


def test_length_that_ends_drafting_is_of_the_first_model_runner(model: Path) -> None:
    """EAGLE heads are often trained on 2,048 tokens. The second runner drafts for longer requests, too."""
    assert hasattr(VllmConfig, "use_v2_model_runner"), "vLLM says in another way which runner it has"
    draft = draft_of(model, "eagle")
    draft.draft_model_config.max_model_len = 2048
    assert drafted_tokens(vllm_config(model, {}, speculative_config=draft)) == 2045
    second = vllm_config(model, {}, speculative_config=draft, use_v2_model_runner=True)
    assert drafted_tokens(second) == sys.maxsize
    assert drafted_tokens(vllm_config(model, {})) is None
    plain = vllm_config(model, {}, speculative_config=draft_of(model, "draft_model"), use_v2_model_runner=True)
    assert drafted_tokens(plain) is None, "its KV depends on nothing behind a block"


def test_several_modules_of_mtp_are_refused(model: Path) -> None:
    several = draft_of(model, "mtp", num_nextn_predict_layers=3)
    assert "MTP with several modules" in refused(model, speculative_config=several)
    several.num_speculative_tokens = 1
    assert engine_fields(model, speculative_config=several)["draft_layers"] == "mtp"


def test_draft_over_other_ranks_is_refused(model: Path) -> None:
    draft = draft_of(model, "eagle")
    draft.draft_parallel_config = SimpleNamespace(tensor_parallel_size=2)
    assert "over 2 tensor-parallel ranks beside a model over 1" in refused(model, speculative_config=draft)


def test_draft_layers_beside_several_groups_are_refused(model: Path) -> None:
    config = vllm_config(model, {}, speculative_config=draft_of(model, "eagle"))
    with pytest.raises(UnsupportedLayout, match=r"draft layers \(EAGLE, MTP\) beside 2 KV cache groups"):
        compat.engine_spec(config, cache_config(FULL, WINDOW), ConnectorOptions())


def test_options_that_need_vllms_own_names_are_refused(model: Path) -> None:
    config = vllm_config(model, {}, speculative_config=draft_of(model, "eagle"))
    with pytest.raises(ConfigError, match="offload 'evicting' needs speculative decoding without EAGLE or MTP"):
        compat.check_offload(config, ConnectorOptions(offload=Offload.EVICTING), 1)
    with pytest.raises(ConfigError, match="tails needs an engine without EAGLE or MTP"):
        compat.check_tails(config, cache_config(), ConnectorOptions(tails=True))


@pytest.mark.parametrize("slot_tokens", [BLOCK, 3 * BLOCK])
def test_router_names_blocks_by_the_block_behind(model: Path, slot_tokens: int) -> None:
    """As the engine does, which gives them to nobody without that block."""
    options = ConnectorOptions(slot_tokens=slot_tokens)
    fields = engine_fields(model, options, speculative_config=draft_of(model, "eagle"))
    without = {**fields, "slot_tokens": str(BLOCK)}
    del without["draft_layers"]
    tokens = list(range(10 * BLOCK + 5))
    assert block_namer(fields)(tokens) == block_namer(without)(tokens)[slot_tokens // BLOCK :: slot_tokens // BLOCK]


def engine_fields(model: Path, options: ConnectorOptions | None = None, **changes: Any) -> dict[str, str]:
    config = vllm_config(model, {}, **changes)
    return dict(compat.engine_spec(config, cache_config(), options or ConnectorOptions()).fingerprint.fields)


def draft_of(model: Path, method: str, **hf: object) -> Draft:
    """Of the model's own files."""
    draft = copy(vllm_config(model, {}).model_config)
    draft.hf_config = HfConfig(hidden_size=16, **hf)
    return Draft(method=method, draft_model_config=draft, draft_parallel_config=None, num_speculative_tokens=3)


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
