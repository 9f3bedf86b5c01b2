"""One real vLLM replica as a process that a test drives: JSON lines in, JSON lines out.

{"prompts": ["..."], "max_tokens": 8}  ->  {"outputs": [{"token_ids": [...], ...}], "seconds": 1.2, "ended_at": 1.7e9,
                                            "drafts": [[...], ...]}  what was drafted in each step
    "params": [{...}]                  kv_transfer_params, one each
    "abort_after": 0.5                 seconds; what is not finished then is aborted
    "logprobs": true                  the outputs have the log-probability of each token
{"reset": true}                     ->  {"reset": true}       forgets the engine's own prefix cache
    "overwrite": true                 and fills every cache tensor with nonsense
{"reset_all": true}                 ->  {"reset": true}       the connector's as well; false when it is refused
{"scale_norms": 0.3}                ->  {"scaled": 12}        changes the weights in place
{"midway": "...", "max_tokens": 20, "after": 8, "scale_norms": 0.3}  ->  {"outputs": [...]}
    the weights change when so many tokens are there, as `pause_generation(mode="keep")` allows
{"session": [[1, 2], [3]], "max_tokens": 20}  ->  {"token_ids": [...]}
    streaming input, each part once the one before is answered; all tokens that the session has computed
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.conftest import SESSION_VARIABLE
from tests.vllm import nursery

ON_GPU = Path("/dev/nvidiactl").exists()
MAY_PASS = ("gave_up_waiting", "acquires_cut_tier_not_open")  # counters of misses that the next try may not have
BLOCKS = 160  # of KV space by default, 5,120 tokens: touching a gigabyte anew takes an engine longer than to load


class Replica:
    """The test's end of the pipe. `extra`: options of our connector, None for an engine without; `connector`: another
    one. `namespaces_of`: a process whose network and mounts the engine shall see. Under pytest and without a GPU the
    process is forked, see `nursery`, and its KV space is small."""

    def __init__(
        self,
        model: Path,
        extra: dict[str, object] | None,
        log: Path,
        namespaces_of: int | None = None,
        role: str = "kv_both",
        threads: int = 0,
        connector: dict[str, object] | None = None,
        variables: dict[str, str] | None = None,
        **engine: object,
    ) -> None:
        forked = SESSION_VARIABLE in os.environ and not ON_GPU
        if forked:
            engine = {"num_gpu_blocks_override": BLOCKS, **engine}
        arguments = ["--model", str(model), "--engine", json.dumps(engine)]
        if extra is not None:
            connector = {
                "kv_connector": "KVServiceConnector",
                "kv_connector_module_path": "kvservice.connector.vllm",
                "kv_role": role,
                "kv_connector_extra_config": extra,
            }
        if connector is not None:
            arguments += ["--connector", json.dumps(connector)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "VLLM_NO_USAGE_STATS": "1"}
        environment.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
        environment.update(VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_OMP_THREADS_BIND="nobind")
        environment.update(VLLM_LOGGING_STREAM="ext://sys.stderr")  # stdout is for answers, and tests read the log
        environment.update(variables or {})
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._is_ready = False
        self._log = log.open("ab")
        self._process: subprocess.Popen[bytes] | nursery.Forked
        if forked:
            self._process = nursery.start(
                "tests.vllm.replica", arguments, environment, self._log.fileno(), namespaces_of=namespaces_of
            )
        else:
            assert namespaces_of is None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.replica", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
            )
        self.log = log
        self.pid = self._process.pid

    def ready(self) -> Replica:
        """Blocks until the model is loaded."""
        if not self._is_ready:
            self.block_tokens = int(self._read()["block_tokens"])  # of the engine's blocks, which may have chosen it
            self._is_ready = True
        return self

    def send(self, **command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def ask(self, prompt: Any, max_tokens: int = 8) -> dict[str, Any]:
        """One prompt, a text or vLLM's `{"prompt_token_ids": ...}`; its output, with `seconds` and `drafts`."""
        answer = self.ask_all([prompt], max_tokens)
        return {**answer["outputs"][0], "seconds": answer["seconds"], "drafts": answer["drafts"]}

    def ask_warm(self, prompt: Any, max_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """`ask`, of which the pool must serve so many tokens. A tiny model is computed within milliseconds, and on a
        busy machine the engine rightly waits no longer than that for an answer. Nor does it wait for a tier that is
        still opening. Only then is it asked again."""
        for _ in range(5):
            before = self.counters()
            output = self.ask(prompt, max_tokens)
            after = self.counters()
            if output["cached_tokens"] >= cached_tokens or all(after[name] == before[name] for name in MAY_PASS):
                break
            self.reset()
        assert output["cached_tokens"] >= cached_tokens, f"too little came from the pool: {output} {after - before}"
        return output

    def ask_all(self, prompts: list[Any], max_tokens: int = 8) -> dict[str, Any]:
        """All at once, so that the engine batches them."""
        self.send(prompts=prompts, max_tokens=max_tokens)
        return self._read()

    def send_prompt(self, prompt: str, params: object = None, max_tokens: int = 8, **more: object) -> None:
        """Like `ask`, with kv_transfer_params; `first_answer` waits for it."""
        self.send(prompts=[prompt], params=[params], max_tokens=max_tokens, **more)

    def first_answer(self) -> dict[str, Any]:
        answer = self._read()
        return {**answer["outputs"][0], "seconds": answer["seconds"], "ended_at": answer["ended_at"]}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def tokens(self, prompts: list[str], max_tokens: int = 8) -> list[list[int]]:
        return [output["token_ids"] for output in self.ask_all(prompts, max_tokens)["outputs"]]

    def counters(self) -> Counter[str]:
        self.send(counters=True)
        return Counter(self._read())

    def answer(self) -> dict[str, Any]:
        """The answer to an earlier `send`."""
        return self._read()

    def reset(self, *, overwrite: bool = False) -> None:
        self.send(reset=True, overwrite=overwrite)
        self._read()

    def end(self) -> None:
        """Tells the engine to end, without waiting for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def close(self) -> None:
        self.end()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"@"):
                found: dict[str, Any] = json.loads(line[1:])
                return found
        raise AssertionError(f"the replica ended: {self.log.read_text(errors='replace')[-3000:]}")


def close_all(replicas: Iterable[Replica]) -> None:
    """All at once: an engine takes seconds to end."""
    every = list(replicas)
    for replica in every:
        replica.end()
    for replica in every:
        replica.close()


def leave_torchvision_out() -> None:
    """vLLM's file of Qwen3.5 imports what prepares pictures, and that torchvision, which the locked packages leave out.
    Text needs none of it: a module of empty classes is enough, here and where vLLM looks at the model."""
    folder = str(Path(__file__).parent / "without_pictures")
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--connector", type=json.loads, default=None)
    parser.add_argument("--engine", type=json.loads, default={})
    given = parser.parse_args()
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None if given.connector is None else KVTransferConfig(**given.connector)
    settings = {"dtype": "float32", "max_model_len": 4096, "block_size": 32, **given.engine}
    if settings.pop("whole_chunks", False):
        compute_chunks_whole()
    if settings.pop("without_pictures", False):
        leave_torchvision_out()
    llm = LLM(model=given.model, enforce_eager=True, kv_transfer_config=transfer, disable_log_stats=True, **settings)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preemptions = count_calls(scheduler, "_preempt_request")
    drafts = record_drafts(scheduler)
    say(ready=True, block_tokens=llm.llm_engine.vllm_config.cache_config.block_size)
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("reset"):
            assert llm.reset_prefix_cache(), "some blocks are still in use"
            if command.get("overwrite"):
                assert sum(llm.collective_rpc(overwrite_caches)) > 0
            say(reset=True)
        elif command.get("reset_all"):
            say(reset=llm.reset_prefix_cache(reset_connector=True))
        elif "midway" in command:
            say(outputs=[describe(change_midway(llm, command))])
        elif "session" in command:
            say(token_ids=stream_input(llm.llm_engine, command["session"], command["max_tokens"]))
        elif "scale_norms" in command:
            say(scaled=sum(llm.collective_rpc(scale_norms, args=(command["scale_norms"],))))
        elif command.get("counters"):
            # Under vLLM's MultiConnector ours is the first.
            ours = getattr(scheduler.connector, "_connectors", [scheduler.connector])[0]
            found = {} if ours is None else ours.counters()
            say(**found, preemptions=len(preemptions))
        else:
            drafts.clear()
            started = time.perf_counter()
            prompts = command["prompts"]
            sampling = [
                SamplingParams(
                    temperature=0,
                    max_tokens=command["max_tokens"],
                    ignore_eos=True,
                    logprobs=1 if command.get("logprobs") else None,
                    extra_args=None if params is None else {"kv_transfer_params": params},
                )
                for params in command.get("params") or [None] * len(prompts)
            ]
            if "abort_after" in command:
                outputs = run_and_abort(llm.llm_engine, prompts, sampling, started + command["abort_after"])
            else:
                outputs = llm.generate(prompts, sampling, use_tqdm=False)
            seconds, ended_at = time.perf_counter() - started, time.time()
            while scheduler.has_requests():  # as a server's loop does: the last copies need steps of their own
                llm.llm_engine.step()
            described = [describe(output) for output in outputs]
            say(outputs=described, seconds=seconds, ended_at=ended_at, drafts=drafts)
    llm.llm_engine.engine_core.shutdown()


def run_and_abort(engine: Any, prompts: list[str], sampling: list[Any], deadline: float) -> list[Any]:
    """What was finished by then."""
    for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add_request(f"abort-{deadline}-{number}", prompt, params)
    finished: list[Any] = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
        if time.perf_counter() > deadline:
            engine.abort_request([f"abort-{deadline}-{number}" for number in range(len(prompts))])
    return finished


def compute_chunks_whole() -> None:
    """Let Mamba-2 layers ask for no state within a chunk, because vLLM's kernel for CPUs cannot give it and the engine
    dies: chunks end between blocks instead."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    mamba_mixer2.MambaMixer2.get_kv_cache_spec = mamba_mixer2.MambaBase.get_kv_cache_spec


def overwrite_caches(worker: Any) -> int:
    """In the worker: every tensor that holds blocks or states. How many they are."""
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    found = [layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")]
    tensors = [tensor for cache in found for tensor in (cache if isinstance(cache, tuple | list) else [cache])]
    for tensor in tensors:
        tensor.fill_(3.0)
    return len(tensors)


def scale_norms(worker: Any, factor: float) -> int:
    """In the worker: every layer norm of every second layer. How many they are."""
    import torch

    found = [
        parameter
        for name, parameter in worker.model_runner.model.named_parameters()
        if "layernorm" in name and int(name.split("layers.")[1].split(".")[0]) % 2
    ]
    with torch.no_grad():
        for parameter in found:
            parameter.mul_(factor)
    return len(found)


def change_midway(llm: Any, command: dict[str, Any]) -> Any:
    """Other weights while a request runs: it is preempted, and computed again with them."""
    from vllm import SamplingParams

    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    params = SamplingParams(temperature=0, max_tokens=command["max_tokens"], ignore_eos=True)
    engine.add_request("midway", command["midway"], params)
    while len(request_of(core.scheduler).output_token_ids) < command["after"]:
        engine.step()
    time.sleep(1)  # copies end, which the next step hears: vLLM resets nothing while blocks are held
    engine.step()
    core._reset_caches()
    scale = llm.collective_rpc(scale_norms, args=(command["scale_norms"],))
    assert sum(scale) > 0
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    while core.scheduler.has_requests():
        engine.step()
    return outputs[0]


def stream_input(engine: Any, parts: list[list[int]], max_tokens: int) -> list[int]:
    """As AsyncLLM does for a generator of inputs: each part is answered, and an empty end follows."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import RequestStatus

    scheduler = engine.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def add(tokens: list[int], *, resumable: bool) -> None:
        engine.engine_core.add_request(
            EngineCoreRequest("session", tokens, None, params, None, time.time(), None, None, None, resumable=resumable)
        )

    for part in parts:
        add(part, resumable=True)
        session = request_of(scheduler)
        while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            engine.step()
    computed = list(session.all_token_ids[: session.num_computed_tokens])
    add([0], resumable=False)
    while scheduler.has_requests():
        engine.step()
    return computed


def request_of(scheduler: Any) -> Any:
    return next(iter(scheduler.requests.values()))


def count_calls(owner: Any, name: str) -> list[int]:
    """Wrap a method so that each call leaves an entry in the returned list."""
    calls: list[int] = []
    unpatched = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return unpatched(*args, **kwargs)

    setattr(owner, name, counted)
    return calls


def record_drafts(scheduler: Any) -> list[list[int]]:
    """A list that gets what is drafted of the first request in each step."""
    drafts: list[list[int]] = []
    unpatched = scheduler.update_draft_token_ids

    def recorded(found: Any) -> None:
        drafts.append(list(found.draft_token_ids[0]))
        unpatched(found)

    scheduler.update_draft_token_ids = recorded
    return drafts


def describe(output: Any) -> dict[str, Any]:
    return {
        "token_ids": list(output.outputs[0].token_ids),
        "text": output.outputs[0].text,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "params": output.kv_transfer_params,
        "logprobs": [next(iter(token.values())).logprob for token in output.outputs[0].logprobs or ()],
    }


def say(**values: object) -> None:
    print("@" + json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
