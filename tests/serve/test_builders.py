"""What the builders make of an app's arguments, with Ray's own models of them; nothing is started.

Marked as the other tests with Ray: importing ray.serve.llm takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray.serve.llm")

from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.serve.llm import LLMConfig
from ray.serve.schema import ServeDeploySchema

from kvservice.errors import ConfigError
from kvservice.serve import app, ray_llm
from kvservice.serve.ray_llm import CONNECTOR, DecodeServer, KVServiceBackend, RetryingIngress, is_replica_loss

pytestmark = pytest.mark.ray

EXAMPLES = Path(__file__).parents[2] / "examples"


def model(name: str, **engine: Any) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": name, "model_source": f"models/{name}"},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "engine_kwargs": {"max_model_len": 512, **engine},
    }


def connector_of(config: LLMConfig) -> dict[str, Any]:
    found: dict[str, Any] = config.engine_kwargs.get("kv_transfer_config", {})
    return found


def test_every_model_of_an_app_gets_the_connector() -> None:
    given = LLMConfig(**model("b"))
    section, arguments = app.wire_openai({"llm_configs": [model("a"), given], "kvservice": {"router": "default"}})
    assert section.service == "default"
    assert [connector_of(c)["kv_role"] for c in arguments["llm_configs"]] == ["kv_both", "kv_both"]
    assert arguments["ingress_cls_config"]["ingress_cls"].endswith(RetryingIngress.__name__)
    assert connector_of(given) == {}  # the user's own is as it was


def test_models_that_are_not_named_stay_without() -> None:
    wanted = {"router": "default", "models": ["b"]}
    _, arguments = app.wire_openai({"llm_configs": [model("a"), model("b")], "kvservice": wanted})
    assert [bool(connector_of(c)) for c in arguments["llm_configs"]] == [False, True]
    with pytest.raises(ConfigError, match="names 'c', but the app has 'a', 'b'"):
        app.wire_openai({"llm_configs": [model("a"), model("b")], "kvservice": {**wanted, "models": ["c"]}})


def test_a_server_that_a_user_chose_does_not_end_with_its_engine() -> None:
    theirs = {**model("b"), "server_cls": "ray.llm._internal.serve.core.server.llm_server.LLMServer"}
    given = {"llm_configs": [model("a"), theirs, model("c")], "kvservice": {"router": "default", "models": ["a", "b"]}}
    _, arguments = app.wire_openai(given)
    assert [c.server_cls for c in arguments["llm_configs"]] == [ray_llm.LLMServer, LLMServer, None]


def test_a_users_ingress_is_kept() -> None:
    theirs = {"ingress_cls": "ray.serve.llm.ingress:OpenAiIngress"}
    given = {"llm_configs": [model("a")], "ingress_cls_config": theirs, "kvservice": {"router": "default"}}
    assert app.wire_openai(given)[1]["ingress_cls_config"] == theirs


def test_a_prefill_decode_app_has_a_writer_and_a_reader() -> None:
    given = {"prefill_config": model("a"), "decode_config": model("a"), "kvservice": {"router": "default"}}
    _, arguments = app.wire_pd(given)
    assert connector_of(arguments["prefill_config"])["kv_role"] == "kv_producer"
    assert connector_of(arguments["decode_config"])["kv_role"] == "kv_consumer"
    with pytest.raises(ConfigError, match="use the same model"):
        app.wire_pd({**given, "decode_config": model("b")})
    for left_out in ({}, {"decode_config": None}):
        with pytest.raises(ConfigError, match="needs decode_config"):
            app.wire_pd({"prefill_config": model("a"), "kvservice": {"router": "default"}, **left_out})
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": CONNECTOR}]},
    }
    with pytest.raises(ConfigError, match="alone"):
        app.wire_pd({**given, "decode_config": model("a", kv_transfer_config=several)})
    with pytest.raises(ConfigError, match="needs 'eager'"):
        app.wire_pd({**given, "kvservice": {"router": "default", "connector": {"offload": "lazy"}}})


@pytest.mark.parametrize("name", ["serve_openai.yaml", "serve_pd.yaml"])
def test_the_examples_are_what_serve_and_the_builders_take(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    described = ServeDeploySchema.model_validate(yaml.safe_load(text))
    again = ServeDeploySchema.model_validate(yaml.safe_load(yaml.safe_dump(described.model_dump(exclude_unset=True))))
    assert again == described
    arguments = again.applications[0].args
    arguments["kvservice"]["router"] = "default"
    if "prefill_config" in arguments:
        assert described.applications[0].import_path == "kvservice.serve:build_pd_openai_app"
        app.wire_pd(arguments)
    else:
        assert described.applications[0].import_path == "kvservice.serve:build_openai_app"
        app.wire_openai(arguments)


def test_the_settings_of_the_page_are_those_of_the_builders() -> None:
    text = (EXAMPLES.parent / "docs" / "serve.md").read_text()
    (block,) = re.findall(r"```python\n(from ray.serve.llm import LLMConfig\n.*?)```", text, re.DOTALL)
    said: dict[str, Any] = {}
    exec(block, said)
    plain = {"model_loading_config": {"model_id": "llama", "model_source": "meta-llama/Llama-3.1-8B-Instruct"}}
    _, arguments = app.wire_openai({"llm_configs": [plain]})
    (wired,) = arguments["llm_configs"]
    assert connector_of(said["llama"]) == connector_of(wired)
    assert said["llama"].deployment_config == wired.deployment_config


class Request:
    """As much of vLLM's requests as a hand-off touches."""

    def __init__(self) -> None:
        self.max_tokens: int | None = 8
        self.min_tokens = 4
        self.stream = True
        self.kv_transfer_params: Any = {"kvservice": {"node": "chosen by the client"}}

    def model_copy(self, deep: bool) -> Request:
        assert deep
        copied = Request()
        copied.__dict__.update(self.__dict__)
        return copied


def test_both_halves_of_a_handoff_are_told_its_id_and_node() -> None:
    backend = KVServiceBackend(LLMConfig(**model("a")))
    ids = set()
    for _ in range(2):
        request = Request()
        prefill = backend.prepare_prefill_request(request=request, peer={"node": "n1"})
        decode = backend.prepare_decode_request(request=request, peer={"node": "n1"}, prefill_response=None)
        ours, theirs = (half.kv_transfer_params["kvservice"] for half in (prefill, decode))
        assert ours == {"version": 1, "role": "prefill", "handoff": theirs["handoff"]}
        assert theirs == {"version": 1, "role": "decode", "handoff": ours["handoff"], "node": "n1"}
        assert (prefill.max_tokens, prefill.min_tokens, prefill.stream) == (1, 0, False)
        assert (decode.max_tokens, decode.stream) == (8, True)
        ids.add(ours["handoff"])
    assert len(ids) == 2


def test_decode_without_a_prefill_replica_is_ordinary() -> None:
    backend = KVServiceBackend(LLMConfig(**model("a")))
    assert backend.prepare_decode_request(request=Request(), peer={}, prefill_response=None).kv_transfer_params is None


def test_what_a_client_asks_of_the_cache_is_kept_in_both_halves() -> None:
    backend = KVServiceBackend(LLMConfig(**model("a")))
    request = Request()
    asked = {"hints": {"version": 1, "turn": "last"}, "load": False, "public_tokens": 3}
    request.kv_transfer_params = {"kvservice": {**asked, "role": "prefill", "handoff": "00" * 16}}
    prefill = backend.prepare_prefill_request(request=request, peer={"node": "n1"})
    decode = backend.prepare_decode_request(request=request, peer={"node": "n1"}, prefill_response=None)
    alone = backend.prepare_decode_request(request=request, peer={}, prefill_response=None)
    ours, theirs, ordinary = (half.kv_transfer_params["kvservice"] for half in (prefill, decode, alone))
    assert ordinary == {"version": 1, **asked}, "without a peer only the hand-off is left out"
    assert ours == {**ordinary, "role": "prefill", "handoff": theirs["handoff"]} and ours["handoff"] != "00" * 16
    assert theirs == {**ordinary, "role": "decode", "handoff": ours["handoff"], "node": "n1"}


class Chosen:
    """A prefill's handle and its replica, whose answer never ends."""

    replica_metadata: Mapping[str, Any] = {"node": "n1"}
    replica_id = "r1"

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.completions = self

    @contextlib.asynccontextmanager
    async def choose_replica(self, request: Any, **told: Future[str]) -> AsyncIterator[Any]:
        self.told = told
        yield self

    async def dispatch(self, selection: Any, prefill: Any, raw: Any) -> AsyncIterator[Any]:
        self.asked.append(prefill)
        await asyncio.Event().wait()
        yield None


class Decode(DecodeServer):  # type: ignore[misc]
    """Without an engine."""

    def __init__(self, prefill: Chosen) -> None:
        self._backend, self._prefill = KVServiceBackend(LLMConfig(**model("a"))), prefill

    def __del__(self) -> None:
        """Ray's is a coroutine, which nobody awaits."""

    def _get_connector_backend(self) -> KVServiceBackend:
        return self._backend

    def _prefill_for(self, raw_request_info: Any) -> Chosen:
        return self._prefill


@pytest.fixture
def two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines answer in two pieces."""

    async def answered(self: Any, request: Any, raw: Any = None) -> AsyncIterator[Any]:
        async def pieces() -> AsyncIterator[Any]:
            for _ in range(2):
                await asyncio.sleep(0)
                yield request

        return pieces()

    monkeypatch.setattr(LLMServer, "completions", answered)


async def all_of(answers: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in answers]


@pytest.mark.usefixtures("two_pieces")
async def test_an_answer_does_not_wait_for_its_prefill() -> None:
    prefill = Chosen()
    pieces = await asyncio.wait_for(all_of(Decode(prefill)._pd_handle_request(Request())), 5.0)
    assert len(pieces) == 2 and pieces[0].kv_transfer_params["kvservice"]["role"] == "decode"
    assert len(prefill.asked) == 1
    assert [sent_to.result(0) for sent_to in prefill.told.values()] == ["r1"], "the router hears who got it"


@pytest.mark.usefixtures("two_pieces")
async def test_a_prompt_that_must_not_be_stored_is_handed_to_nobody() -> None:
    prefill, request = Chosen(), Request()
    request.kv_transfer_params = {"kvservice": {"version": 1, "store": False}}
    (piece, _) = await all_of(Decode(prefill)._pd_handle_request(request))
    assert piece.kv_transfer_params == {"kvservice": {"version": 1, "store": False}} and not prefill.asked


@pytest.mark.usefixtures("two_pieces")
@pytest.mark.parametrize("asked", [{"prompt_logprobs": 1}, {"echo": True}])
async def test_no_prefill_computes_what_the_decode_must_compute(asked: dict[str, Any]) -> None:
    prefill, request = Chosen(), Request()
    request.__dict__.update(asked)
    assert len(await all_of(Decode(prefill)._pd_handle_request(request))) == 2
    assert not prefill.asked


@pytest.mark.usefixtures("two_pieces")
async def test_without_prefill_replicas_few_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nobody(Chosen):
        @contextlib.asynccontextmanager
        async def choose_replica(self, request: Any, **told: Future[str]) -> AsyncIterator[Any]:
            self.asked.append(request)
            await asyncio.Event().wait()
            yield None

    monkeypatch.setattr(ray_llm, "PREFILL_CHOICE_SECONDS", 0.05)
    monkeypatch.setattr(ray_llm, "_DRAINING", set())
    prefill = Nobody()
    decode = Decode(prefill)
    for _ in range(3):
        assert len(await all_of(decode._pd_handle_request(Request()))) == 2
    assert len(prefill.asked) == 1
    decode._prefill = found = Chosen()
    decode._backend.choices.open_until = 0.0  # time has passed
    await all_of(decode._pd_handle_request(Request()))
    await all_of(decode._pd_handle_request(Request()))
    assert len(found.asked) == 2, "a replica that is there is asked each time"


def test_only_the_loss_of_a_replica_is_asked_again() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    assert is_replica_loss(ActorDiedError())
    wrapped = RuntimeError("outer")
    wrapped.__cause__ = ActorDiedError()
    assert is_replica_loss(wrapped)
    assert not is_replica_loss(ValueError("bad request"))
    assert not is_replica_loss(RayTaskError("f", "trace", ValueError("bad request")))
