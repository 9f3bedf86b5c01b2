"""The class vLLM loads: whatever breaks behind it, the engine gets a neutral answer and goes on.

Uses vLLM's base classes and plain stand-ins for its configuration; no engine is started.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvservice.connector.options import ConnectorOptions
from kvservice.connector.scheduler.handoff import decode_params, parse_transfer_params
from kvservice.connector.vllm import KVServiceConnector, compat
from kvservice.core.messages import Handoff
from kvservice.errors import ConfigError, RandomHashSeed, UnsupportedDevice, UnsupportedLayout
from kvservice.testing.eventually import eventually
from kvservice.units import HandoffId, NodeId
from tests.settled import has_slots

BLOCK, HEADS, HEAD_SIZE, BLOCKS = 16, 2, 8, 16
LAYERS = ["model.0", "model.1"]
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)


def cache_config(*specs: Any) -> KVCacheConfig:
    found = [KVCacheGroupSpec(LAYERS, spec) for spec in specs or (FULL,)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=found, hash_block_size=BLOCK)


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, object]:
        return dict(vars(self))


def vllm_config(model: Path, extra: dict[str, object], **changes: Any) -> Any:
    hf = HfConfig(hidden_size=16, rope_theta=1.0, _name_or_path=str(model))
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, tensor_parallel_size=1, decode_context_parallel_size=1, world_size=1, rank=0
    )
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVServiceConnector", kv_role=changes.pop("role", "kv_both"), kv_connector_extra_config=extra
        ),
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2 * BLOCK, policy="fcfs"),
        model_config=SimpleNamespace(
            model=str(model),
            served_model_name="m",
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            hf_config=hf,
            hf_text_config=hf,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor", enable_prefix_caching=True
        ),
        attention_config=SimpleNamespace(backend=None),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        kv_events_config=None,
    )
    for name, value in changes.items():
        owner = config
        *path, last = name.split("__")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


@dataclass
class Request:
    """What the connector reads of vLLM's request."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    status: RequestStatus = RequestStatus.RUNNING
    kv_transfer_params: Any = None
    cache_salt: str | None = None
    lora_request: Any = None
    trace_headers: Any = None
    all_token_ids: tuple[int, ...] = tuple(range(1024))
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    resumable: bool = False


@dataclass
class StepOutput:
    """What it reads of a SchedulerOutput."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    block_ids: dict[str, list[int]] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def scheduled_new_reqs(self) -> list[Any]:
        return [SimpleNamespace(req_id=name, num_computed_tokens=count) for name, count in self.before.items()]

    scheduled_cached_reqs = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())

    @property
    def kv_connector_block_state(self) -> Any:
        return SimpleNamespace(get_block_ids=lambda name: (self.block_ids[name],) if name in self.block_ids else None)


class Pair:
    """Both roles in one process, stepped as vLLM steps them."""

    def __init__(self, model: Path, extra: dict[str, object], **changes: Any) -> None:
        config = vllm_config(model, extra, **changes)
        self.worker = KVServiceConnector(config, KVConnectorRole.WORKER, cache_config())
        backing = torch.randn(len(LAYERS), BLOCKS, HEADS, BLOCK, 2 * HEAD_SIZE).to(torch.bfloat16)
        self.tensors = dict(zip(LAYERS, backing.unbind(0), strict=True))
        self.worker.register_kv_caches(self.tensors)
        self.scheduler = KVServiceConnector(config, KVConnectorRole.SCHEDULER, cache_config())
        self.block_pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.scheduler.bind_gpu_block_pool(self.block_pool)
        self._wait_for_slots()

    def _wait_for_slots(self) -> None:
        """What is computed before the pool is there is not stored."""
        session = self.scheduler._session
        if session is not None:
            eventually(lambda: has_slots(session), "slots of every group", detail=self.scheduler.counters)

    def step(self, output: StepOutput) -> Any:
        metadata = self.scheduler.build_connector_meta(output)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        found = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(found)
        return results

    def match(self, request: Request) -> tuple[int, bool]:
        def answer() -> tuple[int, bool] | None:
            tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
            if tokens is None:
                self.step(StepOutput())
                return None
            return tokens, is_async

        return eventually(answer, f"the answer about {request.request_id}")

    def prefill(self, request: Request, block_ids: list[int]) -> None:
        self.scheduler.on_new_request(request)
        assert self.match(request) == (0, False)
        self.scheduler.update_state_after_alloc(request, blocks(block_ids), 0)
        self.step(
            StepOutput(
                {request.request_id: request.num_tokens}, {request.request_id: 0}, {request.request_id: block_ids}
            )
        )
        request.num_computed_tokens = request.num_tokens

    def finish(
        self, request: Request, block_ids: list[int], status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> dict[str, Any] | None:
        request.status = status
        held, params = self.scheduler.request_finished_all_groups(request, (block_ids,))
        assert not held, "blocks are pinned, not held with their request"
        return params

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def blocks(ids: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (ids,))


def request(name: str, chain: int = 1, count: int = 3) -> Request:
    return Request(name, [f"{chain}-{i}".encode().ljust(32) for i in range(count)], count * BLOCK + 5)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(uuid.uuid4().bytes)
    return tmp_path


@pytest.fixture
def make(model: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def build(extra: dict[str, object] | None = None, **changes: Any) -> Pair:
        options = {"mode": "embedded", "memory": "8MiB", "verify_load": "full", "defer_stores": "off"}
        options |= extra or {}
        made.append(Pair(model, options, **changes))
        return made[-1]

    yield build
    for pair in made:
        pair.close()


def wait_for(pair: Pair, counter: str, count: int) -> None:
    scheduler = pair.scheduler
    eventually(lambda: scheduler.counters().get(counter, 0) >= count, f"{count} {counter}", detail=scheduler.counters)


def test_blocks_come_back_for_the_next_request_byte_for_byte(make: Callable[..., Pair]) -> None:
    pair = make()
    first = request("a")
    pair.prefill(first, [3, 1, 4, 9])
    pair.finish(first, [3, 1, 4, 9])
    wait_for(pair, "stored_blocks", 3)
    wanted = {name: tensor[[3, 1, 4]].clone() for name, tensor in pair.tensors.items()}
    second = request("b")
    pair.scheduler.on_new_request(second)
    assert pair.match(second) == (3 * BLOCK, True)
    pair.scheduler.update_state_after_alloc(second, blocks([7, 8, 10, 11]), 3 * BLOCK)
    results = pair.step(StepOutput())
    assert results.finished_recving == {"b"}
    assert not results.failed_recving
    for name, tensor in pair.tensors.items():
        assert torch.equal(tensor[[7, 8, 10]], wanted[name])
    sources = pair.scheduler.get_external_cache_hit_sources(second, 3 * BLOCK)
    assert {source.value: count for source, count in sources.items()} == {"host": 3 * BLOCK}


def adapted(name: str, path: Path) -> Request:
    found = request(name)
    found.lora_request = SimpleNamespace(lora_path=str(path), lora_int_id=1 + sum(path.name.encode()))
    return found


def test_adapters_share_blocks_only_if_their_bytes_are_equal(make: Callable[..., Pair], tmp_path: Path) -> None:
    """vLLM's hashes are equal here, as those of two replicas are that have other weights at the same path."""
    pair = make({"adapter_files": "immutable"})
    for name, weights in (("poet", b"one"), ("copy", b"one"), ("other", b"two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights)
        eventually(lambda path=str(tmp_path / name): pair.scheduler._adapters.of(path), f"the digest of {name}")
    first = adapted("a", tmp_path / "poet")
    pair.prefill(first, [3, 1, 4, 9])
    pair.finish(first, [3, 1, 4, 9])
    wait_for(pair, "stored_blocks", 3)
    for name, adapter, hit in (("b", "copy", 3), ("c", "other", 0), ("d", "poet", 3)):
        found = adapted(name, tmp_path / adapter)
        pair.scheduler.on_new_request(found)
        assert pair.match(found)[0] == hit * BLOCK, adapter
    plain = request("e")
    pair.scheduler.on_new_request(plain)
    assert pair.match(plain)[0] == 0


def test_an_adapter_not_known_yet_is_served_without_the_cache(make: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make()
    found = adapted("a", tmp_path / "nowhere")
    pair.prefill(found, [3, 1, 4, 9])
    assert pair.finish(found, [3, 1, 4, 9]) is None
    counters = pair.scheduler.counters()
    assert counters["adapter_unknown"] == 1
    assert "store_blocks_planned" not in counters and not any(name.startswith("failed_") for name in counters)


def test_lazy_offload_pins_blocks_until_they_are_copied(make: Callable[..., Pair]) -> None:
    pair = make({"offload": "lazy"})
    one = request("a")
    pair.prefill(one, [3, 1, 4, 9])
    free = pair.block_pool.get_num_free_blocks()
    pair.finish(one, [3, 1, 4, 9])
    assert pair.scheduler.has_pending_push_work()
    assert pair.block_pool.get_num_free_blocks() == free - 3
    pair.step(StepOutput())
    assert not pair.scheduler.has_pending_push_work()
    assert pair.block_pool.get_num_free_blocks() == free
    wait_for(pair, "stored_blocks", 3)


def test_consumer_stores_nothing_and_producer_loads_nothing(make: Callable[..., Pair]) -> None:
    consumer = make(role="kv_consumer")
    consumer.prefill(request("a"), [1, 2, 3, 4])
    assert consumer.scheduler.counters().get("store_blocks_planned", 0) == 0
    producer = make(role="kv_producer")
    one = request("a")
    producer.prefill(one, [1, 2, 3, 4])
    producer.finish(one, [1, 2, 3, 4])
    wait_for(producer, "stored_blocks", 3)
    two = request("b")
    producer.scheduler.on_new_request(two)
    assert producer.match(two) == (0, False)


def test_prefill_is_answered_with_where_to_continue(make: Callable[..., Pair]) -> None:
    pair = make(role="kv_producer")
    asked = request("a")
    asked.kv_transfer_params = {"do_remote_decode": True}
    pair.prefill(asked, [1, 2, 3, 4])
    params = pair.finish(asked, [1, 2, 3, 4], RequestStatus.FINISHED_LENGTH_CAPPED)
    assert params is not None and params["do_remote_prefill"] is True
    found = parse_transfer_params(params)
    assert isinstance(found, Handoff)
    assert pair.scheduler._session is not None and pair.scheduler._session.attachment is not None
    assert found.node_id == pair.scheduler._session.attachment.node_id
    plain = request("b", chain=2)
    pair.prefill(plain, [5, 6, 7, 8])
    assert pair.finish(plain, [5, 6, 7, 8]) is None, "an ordinary request has nothing to hand off"
    aborted = request("c", chain=3)
    aborted.kv_transfer_params = {"do_remote_decode": True}
    pair.prefill(aborted, [9, 10, 11, 12])
    assert pair.finish(aborted, [9, 10, 11, 12], RequestStatus.FINISHED_ABORTED) is None


def test_decode_of_a_prompt_that_nobody_prefills_is_recomputed(make: Callable[..., Pair]) -> None:
    pair = make(role="kv_consumer")
    nobody = Handoff(HandoffId(bytes(16)), NodeId("gone"))
    asked = request("a")
    asked.kv_transfer_params = decode_params(nobody)
    pair.scheduler.on_new_request(asked)
    assert pair.match(asked) == (0, False)
    assert pair.scheduler.counters()["handoffs_read"] == 1


@pytest.mark.parametrize("params", [[], "x", {"kvservice": 3}, {"kvservice": {"version": 1, "role": "decode"}}])
def test_nonsense_in_the_parameters_is_an_ordinary_request(make: Callable[..., Pair], params: Any) -> None:
    pair = make()
    asked = request("a")
    asked.kv_transfer_params = params
    pair.prefill(asked, [1, 2, 3, 4])
    assert pair.scheduler.counters()["handoff_params_refused"] == 1
    assert pair.finish(asked, [1, 2, 3, 4]) is None


def test_events_name_stored_blocks_in_the_engines_own_hashes(make: Callable[..., Pair]) -> None:
    pair = make(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    pair.prefill(request("a"), [1, 2, 3, 4])
    wait_for(pair, "seal_sealed", 3)
    events = list(pair.scheduler.take_events())
    assert [event.parent_block_hash is None for event in events] == [True, False, False]
    assert [event.block_hashes for event in events[:-1]] == [[event.parent_block_hash] for event in events[1:]]
    assert not list(pair.scheduler.take_events())


@pytest.mark.parametrize(
    "part", ["take_answers", "begin_step", "plan_stores", "matched", "allocated", "finished", "reported"]
)
def test_exception_in_a_scheduler_entry_leaves_engine_running(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    pair = make()

    def explode(*args: object, **kwargs: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(pair.scheduler._scheduler, part, explode)
    one = request("a")
    pair.scheduler.on_new_request(one)
    tokens, _ = pair.scheduler.get_num_new_matched_tokens(one, 0)
    assert tokens in (0, None)
    pair.scheduler.update_state_after_alloc(one, blocks([1, 2, 3, 4]), 0)
    pair.step(StepOutput({"a": one.num_tokens}, {"a": 0}, {"a": [1, 2, 3, 4]}))
    pair.finish(one, [1, 2, 3, 4])
    assert sum(count for name, count in pair.scheduler.counters().items() if name.startswith("failed_")) >= 1


def test_exception_in_a_worker_fails_its_load_and_store(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make()
    first = request("a")
    pair.prefill(first, [3, 1, 4, 9])
    pair.finish(first, [3, 1, 4, 9])
    wait_for(pair, "stored_blocks", 3)
    monkeypatch.setattr(pair.worker._worker, "start_loads", explode)
    monkeypatch.setattr(pair.worker._worker, "store", explode)
    second = request("b")
    pair.scheduler.on_new_request(second)
    assert pair.match(second) == (3 * BLOCK, True)
    pair.scheduler.update_state_after_alloc(second, blocks([7, 8, 10, 11]), 3 * BLOCK)
    results = pair.step(StepOutput())
    assert results.failed_recving == results.finished_recving == {"b"}
    third = request("c", chain=2)
    pair.prefill(third, [1, 2, 3, 4])
    assert pair.scheduler.counters()["store_blocks_failed"] == 3
    assert not pair.scheduler.has_pending_push_work()


def explode(*args: object, **kwargs: object) -> None:
    raise RuntimeError("boom")


def with_a_stored_prompt(pair: Pair) -> Request:
    """Another request for a prompt that is in the pool, matched."""
    pair.prefill(request("a"), [3, 1, 4, 9])
    wait_for(pair, "stored_blocks", 3)
    second = request("b")
    pair.scheduler.on_new_request(second)
    assert pair.match(second) == (3 * BLOCK, True)
    return second


def test_load_that_cannot_be_planned_is_a_failed_load(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not promised again."""
    pair = make()
    second = with_a_stored_prompt(pair)
    monkeypatch.setattr(pair.scheduler._scheduler, "allocated", explode)
    pair.scheduler.update_state_after_alloc(second, blocks([7, 8, 10, 11]), 3 * BLOCK)
    assert pair.step(StepOutput()).failed_recving == {"b"}, "the engine waits for this load"
    assert pair.match(second) == (0, False)
    assert not pair.step(StepOutput()).finished_recving, "answered once"


def test_request_whose_load_failed_is_passed_over_once(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks it before the requests that hold blocks, and looks at none of these while it does not fit."""
    pair = make()
    second = with_a_stored_prompt(pair)
    pair.scheduler.update_state_after_alloc(second, blocks([7, 8, 10, 11]), 3 * BLOCK)
    monkeypatch.setattr(pair.worker._worker, "start_loads", explode)
    assert pair.step(StepOutput()).failed_recving == {"b"}
    assert pair.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    assert pair.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)


def test_load_survives_an_exception_in_planning_stores(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make()
    second = with_a_stored_prompt(pair)
    pair.scheduler.update_state_after_alloc(second, blocks([7, 8, 10, 11]), 3 * BLOCK)
    monkeypatch.setattr(pair.scheduler._scheduler, "plan_stores", explode)
    results = pair.step(StepOutput())
    assert (results.finished_recving, results.failed_recving) == ({"b"}, set())


def test_block_found_corrupt_is_not_promised_again(make: Callable[..., Pair]) -> None:
    pair = make()
    second = with_a_stored_prompt(pair)
    segment = pair.worker._worker._segment
    bad = next(slot for slot, _, header in segment.scan() if header.is_stable and header.position == 1)
    segment.payload(bad, 16)[7] ^= 1
    pair.scheduler.update_state_after_alloc(second, blocks([7, 8, 10, 11]), 3 * BLOCK)
    assert pair.step(StepOutput()).failed_recving == {"b"}
    third = request("c")
    pair.scheduler.on_new_request(third)
    assert pair.match(third)[0] == BLOCK, "the block before it is sound"


def test_failed_load_is_recomputed_and_not_promised_again(make: Callable[..., Pair]) -> None:
    pair = make()
    first = request("a")
    pair.prefill(first, [3, 1, 4, 9])
    wait_for(pair, "stored_blocks", 3)
    segment = pair.worker._worker._segment
    for slot, payload_bytes, header in list(segment.scan()):
        if header.is_stable:
            segment.payload(slot, payload_bytes)[7] ^= 1
    second = request("b")
    pair.scheduler.on_new_request(second)
    assert pair.match(second)[0] == 3 * BLOCK
    pair.scheduler.update_state_after_alloc(second, blocks([7, 8, 10, 11]), 3 * BLOCK)
    assert pair.step(StepOutput()).failed_recving == {"b"}
    assert pair.match(second) == (0, False)
    assert pair.scheduler.counters()["load_corrupt"] == 1


def test_policy_that_would_fail_requests_is_set_to_recompute(model: Path) -> None:
    config = vllm_config(model, {"mode": "service", "socket": "/nowhere"})
    assert config.kv_transfer_config.kv_load_failure_policy == "fail", "vLLM's default has changed"
    KVServiceConnector(config, KVConnectorRole.WORKER, cache_config())
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_unknown_option_stops_the_engine_at_start(model: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'memory'"):
        KVServiceConnector(vllm_config(model, {"memroy": "1GiB"}), KVConnectorRole.SCHEDULER, cache_config())


WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16, sliding_window=64
)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("cache", "changes", "says"),
    [
        (cache_config(WINDOW), {}, "sliding_window of 64 tokens, 2 layers: model.0, model.1"),
        (cache_config(FULL, MAMBA), {}, r"group 1 \(mamba, 2 layers: model.0, model.1\) is not supported: vLLM keeps"),
        (cache_config(), {"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        (cache_config(), {"parallel_config__decode_context_parallel_size": 2}, "context"),
        (cache_config(), {"speculative_config": SimpleNamespace(use_eagle=lambda: True, method="dflash")}, "'dflash'"),
        (cache_config(), {"cache_config__prefix_caching_hash_algo": "xxhash"}, "prefix-caching-hash-algo sha256_cbor"),
        (cache_config(), {"device_config__device_type": "xpu"}, r"an Intel GPU \(XPU\).* run it on CPU, CUDA or ROCm"),
        (
            cache_config(),
            {"device_config__device_type": "hpu"},
            r"an Intel Gaudi \(HPU\).* run it on CPU, CUDA or ROCm",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cache: Any, changes: Any, says: str
) -> None:
    """The engine runs without the cache."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = vllm_config(model, {"mode": "embedded"}, **changes)
    with pytest.raises((UnsupportedDevice, UnsupportedLayout, RandomHashSeed), match=says):
        compat.engine_spec(config, cache, ConnectorOptions())
    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        inert = KVServiceConnector(config, role, cache)
        one = request("a")
        inert.on_new_request(one)
        assert inert.get_num_new_matched_tokens(one, 0) == (0, False)
        inert.register_kv_caches({name: torch.zeros(2, 2, 2, 2) for name in LAYERS})
        inert.bind_connector_metadata(inert.build_connector_meta(StepOutput()))
        inert.start_load_kv(None)
        inert.wait_for_save()
        assert not inert.get_transfer_results(set()).finished_recving
        inert.shutdown()
    assert [r for r in caplog.records if "without the cache" in r.message]


OTHER = HfConfig(hidden_size=16, rope_theta=2.0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_config__dtype": torch.float16}, "model_dtype"),
        ({"cache_config__cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"model_config__quantization": "awq"}, "quantization"),
        ({"cache_config__prefix_caching_hash_algo": "sha256"}, "hash"),
        ({"model_config__hf_config": OTHER, "model_config__hf_text_config": OTHER}, "hf.rope_theta"),
        ({"model_config__hf_text_config": OTHER}, "text.rope_theta"),
        ({"attention_config__backend": "OTHER"}, "cell_format"),
    ],
)
def test_what_changes_the_bytes_changes_the_fingerprint(model: Path, change: Any, field: str) -> None:
    base = compat.engine_spec(vllm_config(model, {}), cache_config(), ConnectorOptions()).fingerprint
    other = compat.engine_spec(vllm_config(model, {}, **change), cache_config(), ConnectorOptions()).fingerprint
    assert f"{field}:" in base.difference(other)


def test_engines_with_other_slots_share_no_name(model: Path) -> None:
    """A slot of one block is a slot as it is without the option."""
    options = [ConnectorOptions(slot_tokens=tokens) for tokens in (None, BLOCK, 4 * BLOCK)]
    one, same, several = (compat.engine_spec(vllm_config(model, {}), cache_config(), it) for it in options)
    assert one.fingerprint == same.fingerprint and one.layout == same.layout
    assert "slot_tokens:" in one.fingerprint.difference(several.fingerprint)
    assert several.layout == replace(one.layout, block_tokens=4 * BLOCK, parts=4)
    assert dict(several.fingerprint.fields)["block_tokens"] == str(BLOCK)
    with pytest.raises(ConfigError, match="no multiple of the engine's block size"):
        compat.engine_spec(vllm_config(model, {}), cache_config(), ConnectorOptions(slot_tokens=BLOCK + 1))


def test_same_model_in_another_folder_has_the_same_fingerprint(model: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("copy")
    for path in model.iterdir():
        (elsewhere / path.name).write_bytes(path.read_bytes())
    specs = [compat.engine_spec(vllm_config(at, {}), cache_config(), ConnectorOptions()) for at in (model, elsewhere)]
    assert specs[0].fingerprint == specs[1].fingerprint
    (elsewhere / "model.safetensors").write_bytes(b"other weights...")
    changed = compat.engine_spec(vllm_config(elsewhere, {}), cache_config(), ConnectorOptions())
    assert "weights:" in specs[0].fingerprint.difference(changed.fingerprint)
