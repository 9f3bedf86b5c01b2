"""The back end fits the class that SGLang declares, and its fingerprint names what changes the bytes of a page."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from examples.demo.sglang_engine import HICACHE, SETTINGS, SITE, environment
from kvservice.client.shard import ACQUIRE_SLACK_SECONDS
from kvservice.connector.sglang.options import CALL_SECONDS_MAX
from kvservice.connector.sglang.page_pool import STORE_SECONDS
from tests.vllm.tiny_model import make_llama

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "sglang").is_dir(), reason="no SGLang: make .venv-sglang/.installed"),
]

# For a Service named sglang-external, and one named sglang-fp8. Pods that started before it have none of them.
OF_KUBERNETES = {
    "SGLANG_EXTERNAL_SERVICE_HOST": "10.96.7.7",
    "SGLANG_EXTERNAL_SERVICE_PORT": "8000",
    "SGLANG_EXTERNAL_SERVICE_PORT_HTTP": "8000",
    "SGLANG_EXTERNAL_PORT": "tcp://10.96.7.7:8000",
    "SGLANG_EXTERNAL_PORT_8000_TCP": "tcp://10.96.7.7:8000",
    "SGLANG_EXTERNAL_PORT_8000_TCP_ADDR": "10.96.7.7",
    "SGLANG_FP8_SERVICE_HOST": "10.96.7.8",
    "SGLANG_FP8_PORT": "tcp://10.96.7.8:8000",
}
SIGNATURES = """
import inspect, json
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from kvservice.connector.sglang import HiCacheKVService
ours = vars(HiCacheKVService)
calls = [name for name in vars(HiCacheStorage) if name in ours and callable(getattr(HiCacheStorage, name))]
print(json.dumps({
    "abstract": sorted(HiCacheKVService.__abstractmethods__),
    "missing": sorted(name for name in dir(HiCacheStorage) if name not in ours and not name.startswith("_")),
    "calls": {
        name: [list(inspect.signature(getattr(kind, name)).parameters) for kind in (HiCacheStorage, HiCacheKVService)]
        for name in calls if name != "__init__"
    },
}))
"""
PATIENCE = """
import json
from unittest import mock
from sglang.srt.managers.cache_controller import HiCacheController
threads = {name: mock.Mock(**{"is_alive.return_value": True}) for name in ("prefetch_thread", "backup_thread")}
controller = mock.Mock(spec=["storage_stop_event", *threads], **threads)
try:
    HiCacheController._stop_storage_threads(controller)
except RuntimeError:
    print(json.dumps([thread.join.call_args.kwargs["timeout"] for thread in threads.values()]))
"""
METRICS = """
import json, os, sys
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]  # as SGLang's server does before it starts its processes
from types import SimpleNamespace
from kvservice.connector.sglang import HiCacheKVService
counts = iter([{}, {"stored_pages": 3}, {"stored_pages": 2, "dropped_full": 1}])
backend = HiCacheKVService.__new__(HiCacheKVService)
backend._storage, backend._events = SimpleNamespace(take_counts=lambda: next(counts)), None
for _ in range(3):
    assert backend.get_stats() is None
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(json.dumps([line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]))
"""
FIELDS = """
import json, os, sys
from unittest import mock
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs
from kvservice.connector.sglang import identity
from kvservice.connector.sglang.options import SGLangOptions
found = []
for settings in json.loads(sys.argv[1]):
    with mock.patch.dict(os.environ, settings.pop("environment", {})):
        runtime_context.publish(ServerArgs(**settings), role="scheduler")
        fields = identity.engine_fields(SGLangOptions.parse({"interface_v1": 1}))
    found.append([identity.model_name(), identity.kv_heads(), {name: str(value) for name, value in fields.items()}])
print(json.dumps(found))
"""


def said(program: str, *arguments: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment(), timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_takes_every_call_that_sglang_declares() -> None:
    found = said(SIGNATURES)
    assert isinstance(found, dict)
    assert not found["abstract"]
    assert set(found["missing"]) <= {"on_host_pools_registered"}
    for name, (declared, ours) in found["calls"].items():
        assert declared == ours, name
    assert {"batch_exists", "batch_get_v1", "batch_set_v1", "batch_exists_v2", "batch_get_v2", "batch_set_v2"} <= set(
        found["calls"]
    )


def test_no_call_outlasts_the_patience_of_a_flush() -> None:
    """What it raises then ends SGLang's scheduler, and with it the engine."""
    longest = max(CALL_SECONDS_MAX + ACQUIRE_SLACK_SECONDS, STORE_SECONDS)
    assert said(PATIENCE) == [pytest.approx(10)] * 2 and longest < 10


def test_counters_are_in_the_metrics_of_sglang(tmp_path: Path) -> None:
    found = said(METRICS, str(tmp_path))
    assert isinstance(found, list)
    name = "sglang:kvservice_pages_total"
    assert sorted(found) == [f'{name}{{event="dropped_full"}} 1.0', f'{name}{{event="stored_pages"}} 5.0']


def test_what_changes_a_page_changes_its_name_and_no_more(model_path: Path) -> None:
    base = {**SETTINGS, "model_path": str(model_path)}
    alike: list[Mapping[str, object]] = [
        {"port": 31000, "log_level": "info", "random_seed": 7},
        {"max_running_requests": 9, "chunked_prefill_size": 128, "max_total_tokens": 4096, "context_length": 2048},
        {"schedule_policy": "lpm", "enable_metrics": True, "sampling_backend": "pytorch"},
        {"environment": {"SGLANG_PORT": "31000", "SGLANG_LOG_GC": "1", "SGLANG_RUN_ID": "7"}},
        {"environment": OF_KUBERNETES},
    ]
    other: dict[str, Mapping[str, object]] = {
        "model.kv_cache_dtype": {"kv_cache_dtype": "fp8_e5m2"},
        "model_dtype": {"dtype": "bfloat16"},
        "hf.rope_theta": {"json_model_override_args": '{"rope_theta": 5}'},
        "exec.kernel.attention_backend": {"attention_backend": "triton"},
        "env.SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE": {"environment": {"SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE": "1"}},
        "env.NVIDIA_TF32_OVERRIDE": {"environment": {"NVIDIA_TF32_OVERRIDE": "1"}},
        "observability.forward_hooks": {"forward_hooks": [{"target_modules": ["*"], "hook_factory": "a:b"}]},
    }
    cases = [base, *({**base, **more} for more in (*alike, *other.values()))]
    found = said(FIELDS, json.dumps(cases))
    assert isinstance(found, list)
    (name, heads, fields), rest = found[0], found[1:]
    assert (name, heads) == (model_path.name, 3)
    assert fields["engine"] == "sglang" and fields["weights"].startswith("xxh3:")
    for more, (_, _, others) in zip(alike, rest, strict=False):
        assert others == fields, more
    for changed, (_, _, others) in zip(other, rest[len(alike) :], strict=True):
        assert {key for key in fields | others if fields.get(key) != others.get(key)} == {changed}


def test_a_draft_model_is_named_by_its_bytes(tmp_path: Path, model_path: Path) -> None:
    """Its keys and values lie in the pages of the model. Where its files are changes nothing."""
    folders = [tmp_path / name for name in ("first", "second", "copy")]
    for seed, folder in enumerate(folders[:2]):
        folder.mkdir()
        make_llama(folder, model_path, attention_heads=4, kv_heads=2, seed=seed)
    shutil.copytree(folders[0], folders[2])
    eagle = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_steps": 1}
    base = {**SETTINGS, **HICACHE, **eagle, "model_path": str(model_path), "speculative_num_draft_tokens": 2}
    found = said(FIELDS, json.dumps([{**base, "speculative_draft_model_path": str(each)} for each in folders]))
    assert isinstance(found, list)
    first, second, copy = (fields for _, _, fields in found)
    assert copy == first
    assert {name for name in first | second if first.get(name) != second.get(name)} == {"draft"}
