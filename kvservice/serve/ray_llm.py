"""Everything that builds on internal parts of ray.serve.llm: the hand-off between prefill and decode replicas, and the
ingress that retries. Written for Ray 2.60.

Runs in replicas, on their event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError

from kvservice.actors import names
from kvservice.aio import begun, within
from kvservice.breaker import Breaker
from kvservice.config import REQUEST_TRIES
from kvservice.connector.scheduler.handoff import NAME, OF_HANDOFFS, VERSION
from kvservice.connector.scheduler.switches import STORE
from kvservice.core.bounded_table import BoundedTable
from kvservice.errors import ConfigError
from kvservice.observe.logs import exit_at_once
from kvservice.serve.prompt import SENT_TO

try:
    from ray.llm._internal.common.dict_utils import maybe_apply_llm_deployment_config_defaults
    from ray.llm._internal.serve.constants import RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING
    from ray.llm._internal.serve.core.configs.openai_api_models import (
        ChatCompletionRequest,
        ErrorInfo,
        ErrorResponse,
        to_model_metadata,
    )
    from ray.llm._internal.serve.core.server.llm_server import LLMServer as PlainServer
    from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
        BaseConnectorBackend,
        clamp_request_to_single_token,
    )
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
    from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs
    from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import (
        PDDecodeServer,
        PDOrchestratorMixin,
        PDPrefillServer,
    )
    from ray.serve._private.http_util import session_id_from_headers
    from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress
except ImportError as error:
    raise ConfigError(
        f"kvservice.serve was written for ray.serve.llm of Ray 2.60; this is Ray {ray.__version__}, and something is "
        f"missing: {error}. Install `ray[serve]>=2.60,<3` with pyarrow, pandas, fsspec and jsonref, and vLLM"
    ) from error

log = logging.getLogger("kvservice.serve")

CONNECTOR = "KVServiceConnector"
BACKEND = "kvservice.serve.ray_llm:KVServiceBackend"
# Hand-offs between their two requests, more than a replica has in flight. A forgotten one is computed by the decode
# replica.
HANDOFFS_MAX = 4096
PREFILL_CHOICE_SECONDS = 2.0  # If no prefill replica is free by then, the decode replica computes the prompt itself.
# While there is none, one request looks so often at the least, and the others do not wait.
PREFILL_AGAIN_SECONDS = 5.0
ENGINE_DEAD = "EngineDeadError"  # vLLM's, which the ingress does not import
TRY_AGAIN_SECONDS = 0.2  # Between two tries of a request, so that Serve can notice that the replica is dead.

_DRAINING: set[asyncio.Task[None]] = set()  # of this replica: the loop alone would not keep them alive

DIRECT_STREAMING: bool = RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING


def register_backend() -> None:
    """Tell all processes of the connected cluster about KVServiceBackend. May be called again."""
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        KVConnectorBackendFactory.register_backend(CONNECTOR, BACKEND)


class KVServiceBackend(BaseConnectorBackend):  # type: ignore[misc]
    """The connector's part in one replica: knows the replica's node, and writes the parameters of a hand-off's two
    requests.

    Peers are bound, because the decode request has to name the writer's node. Both requests are sent at once, because
    blocks cross while the prefill runs.
    """

    requires_peer_binding = True
    concurrent_handoff = True

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        # by id() of the request, which is kept alive
        self._handoffs: BoundedTable[int, tuple[Any, str]] = BoundedTable(HANDOFFS_MAX)
        self.choices = Breaker(failures_to_open=1, open_seconds_max=PREFILL_AGAIN_SECONDS)  # of prefill replicas

    def setup(self) -> None:
        """Called in the replica before its engine is made. Names the node's shard, since several may be registered on
        this machine."""
        options = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        if options.get("mode") == "service" and "socket" not in options:
            options.setdefault("node", this_node())

    def replica_metadata(self) -> dict[str, Any]:
        return {"node": this_node()}

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        handoff = secrets.token_hex(16)
        self._handoffs.put(id(request), (request, handoff))
        prefill = request.model_copy(deep=True)
        prefill.kv_transfer_params = _params(request, {"role": "prefill", "handoff": handoff})
        clamp_request_to_single_token(prefill)
        for key, value in (("min_tokens", 0), ("n", 1), ("best_of", None), ("use_beam_search", False)):
            if hasattr(prefill, key):
                setattr(prefill, key, value)
        return prefill

    def prepare_decode_request(self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any | None) -> Any:
        """The decode request. Without a peer, or if no hand-off has begun, it is an ordinary request, and the replica
        computes the prompt itself."""
        _, handoff = self._handoffs.pop(id(request)) or (None, "")
        node = (peer or {}).get("node")
        decode = request.model_copy(deep=True)
        ours = {"role": "decode", "handoff": handoff, "node": node} if handoff and node else {}
        decode.kv_transfer_params = _params(request, ours)
        return decode


def _asked(request: Any) -> dict[str, Any]:
    """What the client asks of the cache: hints and switches. Only this app chooses a hand-off."""
    params = getattr(request, "kv_transfer_params", None)
    asked = params.get(NAME) if isinstance(params, Mapping) else None
    if not isinstance(asked, Mapping):
        return {}
    return {name: value for name, value in asked.items() if name not in OF_HANDOFFS}


def _is_handed_over(request: Any) -> bool:
    """Whether a prefill replica is to compute the prompt. A hand-off goes through the pool, and where the answer is
    about the prompt's tokens vLLM computes them all, whatever is in the cache."""
    about_prompt = getattr(request, "prompt_logprobs", None) is not None or getattr(request, "echo", None) is True
    return not about_prompt and _asked(request).get(STORE) is not False


def _params(request: Any, ours: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the client asks, with our part of a hand-off. None if there is neither."""
    asked = _asked(request)
    return {NAME: {"version": VERSION, **asked, **ours}} if asked or ours else None


class EndsWithItsEngine:
    """Mixed into a server: its process ends as soon as its engine is dead.

    Serve asks for a replica's health three times before it stops it, which takes a minute. Meanwhile such a replica
    refuses at once what it gets, so its queue is the shortest one, and a second try reaches it again. Serve and all
    routers know at once of a process that ended.
    """

    async def check_health(self) -> None:
        try:
            await super().check_health()  # type: ignore[misc]
        except Exception as error:
            _end_if_dead(error)
            raise

    async def _run_request(self, request: Any, **how: Any) -> AsyncGenerator[Any, None]:
        return self._while_alive(await super()._run_request(request, **how))  # type: ignore[misc]

    async def _while_alive(self, answer: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """vLLM tells a stream of its engine's death in a chunk, as of any other error: that chunk is not sent."""
        try:
            async with contextlib.aclosing(answer):
                async for chunk in answer:
                    await self.check_health()
                    yield chunk
        except Exception as error:
            _end_if_dead(error)
            raise


def _end_if_dead(error: Exception) -> None:
    if type(error).__name__ == ENGINE_DEAD:
        log.error("the engine is dead, so its replica ends: Serve starts another one")
        exit_at_once(1)  # an exception would answer this request only


class LLMServer(EndsWithItsEngine, PlainServer):  # type: ignore[misc]
    pass


class PrefillServer(EndsWithItsEngine, PDPrefillServer):  # type: ignore[misc]
    pass


class DecodeServer(EndsWithItsEngine, PDDecodeServer):  # type: ignore[misc]
    """Sends a prompt to a prefill replica and to its own engine at once. The request is answered even if the prefill
    fails: the own engine computes the blocks that did not arrive."""

    async def _pd_handle_request(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        method = "chat" if isinstance(request, ChatCompletionRequest) else "completions"
        backend = self._get_connector_backend()
        call = getattr(self._prefill_for(raw_request_info), method)
        async with contextlib.AsyncExitStack() as stack:
            sent_to: Future[str] = Future()
            selection = None
            if _is_handed_over(request):
                selection = await _choose(stack, call, request, sent_to, backend.choices)
            peer = {} if selection is None else selection.replica_metadata or {}
            if selection is not None and peer.get("node"):
                prefill = backend.prepare_prefill_request(request=request, peer=peer)
                answer = call.dispatch(selection, prefill, raw_request_info)
                sent_to.set_result(selection.replica_id)
                # By itself: the client does not wait for a prefill that its answer did not need.
                begun(_drain(answer, stack.pop_all()), _DRAINING)
            decode = backend.prepare_decode_request(request=request, peer=peer, prefill_response=None)
            async for chunk in await getattr(super(PDOrchestratorMixin, self), method)(decode, raw_request_info):
                yield chunk

    def _prefill_for(self, raw_request_info: Any) -> Any:
        """The prefill handle, with the adapter and the session of this request."""
        handle = self._prefill_handle
        model = ray.serve.get_multiplexed_model_id()
        if model:
            handle = handle.options(multiplexed_model_id=model)
        session = None if raw_request_info is None else session_id_from_headers(raw_request_info.headers)
        return handle.options(session_id=session) if session else handle


async def _choose(
    stack: contextlib.AsyncExitStack, call: Any, request: Any, sent_to: Future[str], choices: Breaker
) -> Any | None:
    """A prefill replica with room, reserved until the stack is left. None if there is none within
    PREFILL_CHOICE_SECONDS, or at once if none was there a moment ago. The router hears by `sent_to` which replica gets
    the request."""
    loop = asyncio.get_running_loop()
    if not choices.admits(loop.time(), PREFILL_CHOICE_SECONDS):
        return None
    choice = call.choose_replica(request, **{SENT_TO: sent_to})
    try:
        selection = await within(PREFILL_CHOICE_SECONDS, stack.enter_async_context(choice))
    except Exception as error:  # noqa: BLE001  no prefill replica, whatever the reason: the decode does without
        if not _DRAINING:  # else there is one, which is full
            choices.failed_once(loop.time())
        log.warning("no prefill replica: %s", type(error).__name__)
        return None
    choices.succeeded()
    return selection


async def _drain(answer: Any, reserved: contextlib.AsyncExitStack) -> None:
    """Read a prefill's answer to its end, then give its replica back: Serve counts a request until then."""
    try:
        async with reserved:
            async for chunk in answer:
                if isinstance(chunk, ErrorResponse):
                    log.warning("a prefill failed, so its decode replica computes the prompt: %s", chunk.error.message)
    except Exception as error:  # noqa: BLE001  task boundary: a prefill replica that died is no matter for the decode
        log.warning("a prefill was lost, so its decode replica computes the prompt: %s", type(error).__name__)


class RetryingIngress(OpenAiIngress):  # type: ignore[misc]
    """Sends a request to another replica if one died before it answered anything.

    An answer that has begun to stream cannot be repeated: its stream ends with an error. After REQUEST_TRIES replicas
    were lost the request is refused, because it may be what crashes them.
    """

    async def _get_response(self, *, body: Any, call_method: str, raw_request: Any | None = None) -> AsyncIterator[Any]:
        for number in range(1, REQUEST_TRIES + 1):
            begun = False
            try:
                async for chunk in super()._get_response(body=body, call_method=call_method, raw_request=raw_request):
                    begun = True
                    yield chunk
                return
            except Exception as error:
                if begun:
                    log.warning("an answer that had begun was lost: %s", type(error).__name__)
                    yield _end_of_stream(error)
                    return
                if number == REQUEST_TRIES or not is_replica_loss(error):
                    raise
                log.warning("a replica was lost, so its request is sent again: %s", type(error).__name__)
            await asyncio.sleep(TRY_AGAIN_SECONDS)


def _end_of_stream(error: Exception) -> str:
    """As vLLM ends a stream that failed. Serve would end it as if it were whole."""
    what = f"the answer was cut off ({type(error).__name__}): send the request again"
    told = ErrorResponse(error=ErrorInfo(message=what, type="InternalServerError", code=500))
    return f"data: {told.model_dump_json()}\n\ndata: [DONE]\n\n"


def is_replica_loss(error: BaseException | None) -> bool:
    """Whether the replica or its engine died, rather than refused the request."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RayActorError) or type(error).__name__ in (ENGINE_DEAD, "ReplicaUnavailableError"):
            return True
        error = getattr(error, "cause", None) or error.__cause__
    return False


def this_node() -> str:
    """The pool's name for the node of this process."""
    return str(names.node_id(ray.get_runtime_context().get_node_id()))


def pd_application(arguments: dict[str, Any]) -> Any:
    """Like ray.serve.llm.build_pd_openai_app, with our DecodeServer."""
    from ray import serve
    from ray.serve.llm import build_llm_deployment

    checked = PDServingArgs.model_validate(arguments)
    prefill, decode = checked.prefill_config, checked.decode_config
    prefill_app = build_llm_deployment(prefill, name_prefix="Prefill:", deployment_cls=PrefillServer)
    decode_app = build_llm_deployment(
        decode, name_prefix="Decode:", bind_kwargs={"prefill_server": prefill_app}, deployment_cls=DecodeServer
    )
    ingress = checked.ingress_cls_config
    options = maybe_apply_llm_deployment_config_defaults(
        ingress.ingress_cls.get_deployment_options([decode]), checked.ingress_deployment_config
    )
    model, lora = decode.model_id, decode.lora_config
    return serve.deployment(make_fastapi_ingress(ingress.ingress_cls), **options).bind(
        llm_deployments={model: decode_app},
        model_cards={model: to_model_metadata(model, decode)},
        lora_paths={} if lora is None else {model: lora.dynamic_lora_loading_path},
        **ingress.ingress_extra_kwargs,
    )
