"""What the back end does not support is refused by name, with SGLang's own arguments and configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.demo.sglang_engine import HICACHE, SETTINGS, SITE
from tests.sglang.test_interface import said

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # SGLang is imported in ten seconds, and in many on a busy machine
    pytest.mark.skipif(not (SITE / "sglang").is_dir(), reason="no SGLang: make .venv-sglang/.installed"),
]

ATTACH = """
import json, logging, os, sys
from unittest import mock
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.server_args import ServerArgs
from kvservice.connector.sglang import HiCacheKVService
from kvservice.errors import ConfigError
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("kvservice.connector").addHandler(Lines())
found = []
for settings, storage in json.loads(sys.argv[1]):
    variables = settings.pop("environment", {})
    args = ServerArgs(**settings)
    runtime_context.publish(args, role="scheduler")
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=args.tp_size, pp_rank=0, pp_size=args.pp_size, attn_cp_rank=0,
        attn_cp_size=args.attn_cp_size, is_mla_model=False, enable_storage_metrics=False,
        is_page_first_layout=True, model_name="a model", extra_config=storage,
    )
    lines.clear()
    try:
        with mock.patch.dict(os.environ, variables):
            backend = HiCacheKVService(config)
    except ConfigError as error:
        found.append({"raised": error.message})
        continue
    keys = ["00" * 32]
    found.append({"logged": list(lines), "served": backend._storage is not None, "pages": backend.batch_exists(keys),
                  "loaded": backend.batch_get_v1(keys, None), "stored": backend.batch_set_v1(keys, None)})
    backend.close()
print(json.dumps(found))
"""
# 'weights_version' spares reading the weights.
EXACT = {"interface_v1": 1, "mode": "embedded", "memory": "16MiB", "weights_version": "1"}
SHARED = {**EXACT, "share": "engines"}
STAGES: dict[str, Any] = {"pp_size": 2}
NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_max_bfs_breadth": 1,
}
EAGLE = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_num_steps": 1,
    "speculative_num_draft_tokens": 2,
}


def attached(model_path: Path, *cases: tuple[dict[str, Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """What the back end says to each pair of SGLang's settings and its own options."""
    base = {**SETTINGS, "model_path": str(model_path)}
    found = said(ATTACH, json.dumps([[{**base, **settings}, options] for settings, options in cases]))
    assert isinstance(found, list)
    return found


def test_context_parallelism_stops_the_start_by_name(model_path: Path) -> None:
    """SGLang itself refuses `dcp-size` with HiCache for all models but those with latent attention."""
    cases = [({name: 2, "tp_size": 2}, options) for name in ("attn_cp_size", "dcp_size") for options in (EXACT, SHARED)]
    raised = [found.get("raised", "") for found in attached(model_path, *cases)]
    context = "attn-cp-size: context parallelism is not supported: each rank holds parts of tokens"
    decode = "dcp-size: decode context parallelism is not supported: each rank holds parts of tokens"
    assert raised == [context, context, decode, decode]


def test_storing_from_a_decode_engine_stops_the_start_by_name(model_path: Path) -> None:
    """SGLang hands over all keys there, also those that it takes out elsewhere."""
    decode = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "fake"}
    settings = {**HICACHE, **decode, "enable_hierarchical_cache": False}
    settings["disaggregation_decode_enable_offload_kvcache"] = True
    (found,) = attached(model_path, (settings, {**EXACT, "hicache_storage_pass_prefix_keys": True}))
    name = "disaggregation-decode-enable-offload-kvcache"
    assert found["raised"] == f"{name} is not supported: SGLang does not say there where in its prompt a page is"


def test_weights_of_another_process_are_named_by_hand_only(model_path: Path) -> None:
    """That process may have loaded other files, or changed its weights since."""
    by_files = {name: value for name, value in EXACT.items() if name != "weights_version"}
    seed = {"seed_instance_ip": "127.0.0.1", "seed_instance_service_port": 1, "send_weights_group_ports": [2]}
    cases: dict[str, dict[str, Any]] = {
        "load-format remote_instance": {
            "load_format": "remote_instance",
            **{f"remote_instance_weight_loader_{name}": value for name, value in seed.items()},
        },
        "weight-cache-mode client": {"weight_cache_mode": "client", "weight_cache_socket": "/nowhere"},
        "speculative-draft-load-format remote_instance": {
            **EAGLE,
            "speculative_draft_model_path": str(model_path),
            "speculative_draft_load_format": "remote_instance",
        },
    }
    pairs = [({**HICACHE, **each}, options) for each in cases.values() for options in (by_files, EXACT)]
    found = attached(model_path, *pairs)
    reason = "the weights are those of another process: set weights_version"
    for words, unnamed, named in zip(cases, found[::2], found[1::2], strict=True):
        assert unnamed["logged"] == [f"serving without the cache: with {words} {reason}"]
        assert not unnamed["served"] and named["served"]


def test_what_is_not_shared_between_engines_is_named(model_path: Path) -> None:
    eagle = {**HICACHE, **EAGLE, "speculative_draft_model_path": str(model_path)}
    asked = {
        "--pp-size 2": {**HICACHE, **STAGES},
        "--speculative-algorithm 'NGRAM'": {**HICACHE, **NGRAM},
        "--speculative-algorithm 'EAGLE'": eagle,
        "--quantization 'fp8'": {**HICACHE, "quantization": "fp8"},
        "--lora-paths ['a=/nowhere']": {**HICACHE, "lora_paths": ["a=/nowhere"]},
        "SGLANG_EXTERNAL_MODEL_PACKAGE=a": {**HICACHE, "environment": {"SGLANG_EXTERNAL_MODEL_PACKAGE": "a"}},
        "--forward-hooks [{'name': 'a'}]": {**HICACHE, "forward_hooks": [{"name": "a"}]},
    }
    for words, found in zip(asked, attached(model_path, *((each, SHARED) for each in asked.values())), strict=True):
        reason = f"share 'engines' is not supported with {words}"
        assert found["logged"] == [f"serving without the cache: {reason}"], words
        assert (found["served"], found["pages"], found["loaded"], found["stored"]) == (False, 0, [False], [False])


def test_stages_and_speculation_are_served_among_their_own(model_path: Path) -> None:
    """Without `share` they are part of the names, or pools of their own."""
    for found in attached(model_path, *(({**HICACHE, **each}, EXACT) for each in (STAGES, NGRAM))):
        assert found["served"] and "without the cache" not in " ".join(found["logged"])
