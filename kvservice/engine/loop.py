"""The loop of the reference engine: text or tokens in, text and tokens out, one step at a time.

A step is: schedule; load, swap in, swap out and copy blocks; one forward; store; choose tokens. What is decided lies in
`schedule` and `blocks`, what is computed in `model` and `sampling`, and the cache in `cache`. One thread uses an
engine. The order of a step is that of vLLM's first engine (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from kvservice.api.arguments import whole_number
from kvservice.connector.options import CopierChoice, Share
from kvservice.connector.scheduler.handoff import parse_public_tokens, parse_transfer_params
from kvservice.connector.scheduler.ports import BlockIds
from kvservice.connector.worker.shared_kv import SharedKV
from kvservice.copying.memory import SharedMemory
from kvservice.core.block.keys import chain_hashes
from kvservice.engine.blocks import BlockAllocator, PagedMemory
from kvservice.engine.cache import POLL_SECONDS, BothHalves, StepEnd
from kvservice.engine.model import PagedModel
from kvservice.engine.options import CPU_BYTES, EngineOptions, PreemptBy
from kvservice.engine.paged import TokenSpan
from kvservice.engine.sampling import Generation, Sampling
from kvservice.engine.schedule import Chunk, Found, Next, Scheduler, SequenceGroup, Step, SwapEstimate
from kvservice.engine.sharing import name_pages
from kvservice.errors import ConfigError, InvalidRequest, KVServiceError
from kvservice.units import BlockHash

log = logging.getLogger("kvservice.engine")

PHASES = ("schedule", "swap", "copy", "forward", "output")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request that has ended."""

    request_id: str
    prompt: list[int]
    token_ids: list[list[int]]  # one list for each of its outputs
    texts: list[str]  # the same as text, if the prompt was text
    local_tokens: int  # of the prompt, found in the engine's own blocks
    loaded_tokens: int  # of the prompt, loaded from the pool
    transfer_params: dict[str, object] | None  # for the engine that continues a prompt computed for it
    reason: str = ""  # why it ended early: aborted, or what it lacked. Empty if it did not


@dataclass(slots=True)
class StepRecord:
    """What a step did, for tests, benchmarks and pictures."""

    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    prefill_tokens: int = 0
    decode_tokens: int = 0
    swapped_in: int = 0  # requests
    swapped_out: int = 0
    recomputed: int = 0  # requests that were preempted without a swap, or whose bytes were lost
    copied: int = 0  # blocks, on write
    loaded: int = 0  # requests whose load has ended
    device_blocks: int = 0  # in use, when the step had been scheduled
    host_blocks: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        """The phase ends now."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


@dataclass(slots=True)
class _Request:
    generation: Generation
    prompt: list[int]
    is_text: bool
    is_admitted: bool = False
    local_tokens: int = 0
    loaded_tokens: int = 0


class ReferenceEngine:
    """Use it as a context manager, or close it."""

    def __init__(self, model: PagedModel, options: EngineOptions | None = None) -> None:
        """Allocate the blocks and attach to the pool; blocks for seconds at most, or minutes if the bytes of a large
        model have to be read to name it.

        Raises:
            ConfigError: an option is wrong, or nothing names the model's weights.
        """
        self.options = options = options or EngineOptions()
        self.model = model
        self.last = StepRecord()  # of the last step
        self.counters: Counter[str] = Counter()
        count = options.device_blocks or model.count_blocks(memory_bytes=self._device_bytes())
        shared = self._shared_memory(count * model.shape.block_bytes)
        memory = None if shared is None else torch.frombuffer(shared.buffer, dtype=torch.uint8)
        model.allocate(count, memory)
        self._shared = SharedKV() if shared is not None else None
        if self._shared is not None:
            self._shared.memory = shared
        host_count = 0 if not options.swaps else count if options.host_blocks is None else options.host_blocks
        self.blocks = PagedMemory(
            BlockAllocator(str(model.device), range(count)),
            BlockAllocator("host", range(host_count)),
            model.shape.block_tokens,
            watermark=options.watermark,
            window=model.window,
            name=name_pages if options.share is Share.ENGINES else chain_hashes,
        )
        self._estimate = SwapEstimate(model.shape.block_bytes)
        self.scheduler = Scheduler(
            self.blocks,
            self._estimate,
            tokens_max=options.step_tokens,
            sequences_max=min(options.sequences, options.step_tokens),
            matched=self._matched,
        )
        self._requests: dict[str, _Request] = {}
        self._number = 0
        self._closed = self._torn = False
        self._cache = self._attach()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        options: EngineOptions | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "auto",
    ) -> ReferenceEngine:
        """An engine for a model in a folder, or of a name that Hugging Face knows."""
        options = options or EngineOptions()
        model = PagedModel.open(path, device=device, dtype=dtype, block_tokens=options.block_tokens)
        return cls(model, options)

    def _device_bytes(self) -> int | None:
        if self.options.device_memory is None and self.model.device.type != "cuda":
            return CPU_BYTES
        return self.options.device_memory

    def _shared_memory(self, byte_count: int) -> SharedMemory | None:
        """Memory that a copy worker can map, if one is wanted and the model is on a CPU."""
        wanted = self.options.cache and self.options.copier is CopierChoice.WORKER
        return SharedMemory.make(byte_count) if wanted and self.model.device.type == "cpu" else None

    def _attach(self) -> BothHalves | None:
        if not self.options.cache:
            return None
        try:
            return BothHalves(self.options, self.model, self.blocks.device, self._shared)
        except ConfigError:
            raise  # a wrong option: fail at start instead of running without a cache
        except KVServiceError as error:
            log.error("running without the cache: %s", error.message)
            return None

    # -- requests ----

    def add(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        request_id: str = "",
        transfer_params: Mapping[str, object] | None = None,
        salt: bytes = b"",
    ) -> str:
        """A request that waits from now on. Returns its id.

        Args:
            transfer_params: as `kv_transfer_params` of vLLM: a hand-off, public tokens, switches, hints.
            salt: requests with another salt share no blocks.

        Raises:
            InvalidRequest: it can never run here, what it says of a hand-off or public tokens makes no sense, the
                engine is closed, or a step did not end.
        """
        self._check()
        sampling = sampling or Sampling()
        given = self.model.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = [whole_number("a token", token) for token in given]
        length_max, config = len(tokens) + sampling.max_tokens, self.model.config.get_text_config()
        wrong = [token for token in tokens if not 0 <= token < config.vocab_size]
        if wrong:  # the step that computes it would fail, and with it every request of the engine
            raise InvalidRequest(f"tokens of this model are 0 to {config.vocab_size - 1}, not {wrong[0]}")
        positions = self.model.positions
        if positions is not None and length_max > positions:
            raise InvalidRequest(
                f"a prompt of {len(tokens)} tokens and {sampling.max_tokens} more are over the {positions} positions "
                "of the model, or of its short texts with LongRoPE: shorten the prompt, or ask for fewer tokens"
            )
        # What makes no sense is refused here; the halves, which parse it again, would serve it without the pool.
        parse_transfer_params(transfer_params)
        parse_public_tokens(transfer_params)
        self._number += 1
        request_id = request_id or f"request-{self._number}"
        width = max(sampling.n, sampling.beams)
        group = self.scheduler.add(request_id, tokens, length_max=length_max, width=width, salt=salt)
        self._requests[request_id] = _Request(Generation(sampling, self.model.eos), tokens, isinstance(prompt, str))
        if self._cache is not None:
            hashes = self.blocks.hashes(group.sequences[0])[: len(tokens) // self.blocks.block_tokens]
            self._cache.begin(
                request_id,
                hashes,
                len(tokens),
                tail=partial(self.blocks.tail_hash, group.sequences[0]),
                params=transfer_params,
                salted=bool(salt),
            )
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request. The next step returns it."""
        self.scheduler.abort(request_id)

    @property
    def has_requests(self) -> bool:
        return bool(self.scheduler.groups)

    @property
    def has_work(self) -> bool:
        """Whether steps are needed: for requests, or for copies that have to end."""
        return self.has_requests or (self._cache is not None and self._cache.has_pending_work)

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], sampling: Sampling | None = None
    ) -> list[RequestOutput]:
        """Run these prompts to their end, in batches, and store what is left to store. Returns an output for each."""
        wanted: list[str] = []
        found: dict[str, RequestOutput] = {}
        try:
            for prompt in prompts:
                wanted.append(self.add(prompt, sampling))
            while self.has_work:
                found.update({output.request_id: output for output in self.step()})
        finally:
            for request_id in wanted:
                if request_id not in found:
                    self.abort(request_id)  # after a prompt that was refused
        return [found[request_id] for request_id in wanted]

    # -- a step ----

    def step(self) -> list[RequestOutput]:
        """One step. Returns the requests that ended with it. Blocks while the model computes, and for milliseconds if
        there is nothing to compute.

        Raises:
            InvalidRequest: the engine is closed, or a step before did not end.
        """
        self._check()
        self._torn = True  # nobody can go on with books that Ctrl-C, or a model that failed, left half changed
        outputs = self._step()
        self._torn = False
        return outputs

    def _check(self) -> None:
        if self._closed:
            raise InvalidRequest("this engine is closed: make another one")
        if self._torn:
            raise InvalidRequest(
                "a step of this engine was interrupted, or its model failed: close the engine and make another one, "
                "with the model as it is"
            )

    def _step(self) -> list[RequestOutput]:
        record = self.last = StepRecord()
        step = self.scheduler.schedule()
        self._note(record, step)
        for admitted in step.admitted:
            self._admit(admitted.group, admitted.local_tokens, admitted.external_tokens)
        record.lap("schedule")
        self._swap(record, step)
        record.lap("swap")
        if step.copy:
            self.model.kv.copy_blocks(torch.tensor(step.copy, dtype=torch.int64))
        record.lap("copy")
        chunks, logits = self._forward(step)
        record.lap("forward")
        if self._cache is not None:
            self._cache.store()
            self._end(record, self._cache.end(step.tokens, record.seconds["forward"]))
        self._observe(record)
        self.scheduler.commit(self._choose(step, chunks, logits))
        outputs = [self._finish(group) for group in self.scheduler.finished]
        self.scheduler.free_finished()
        record.lap("output")
        if not chunks and not outputs:
            time.sleep(POLL_SECONDS)  # only loads, or answers of the pool, are due
        return outputs

    def _matched(self, request_id: str, local_tokens: int, total_tokens: int) -> Found:
        return Found() if self._cache is None else self._cache.matched(request_id, local_tokens, total_tokens)

    def _admit(self, group: SequenceGroup, local_tokens: int, external_tokens: int) -> None:
        request = self._requests[group.request_id]
        if not request.is_admitted:  # what comes back after a preemption is no hit
            request.is_admitted = True
            request.local_tokens, request.loaded_tokens = local_tokens, external_tokens
        if self._cache is not None:
            self._cache.allocated(group.request_id, group.sequences[0].table, external_tokens)

    def _swap(self, record: StepRecord, step: Step) -> None:
        """Loads and swaps. Whoever's bytes are lost is computed again, and leaves the step."""
        if self._cache is None:
            return
        if not step.chunks:
            self._cache.wait_for_answer()
        moved = 0
        begun = time.perf_counter()
        lost = self._cache.start(((swap.request_id, swap.pairs) for swap in step.swap_in), is_idle=not step.chunks)
        for swap in step.swap_out:
            if not self._cache.swap_out(swap.request_id, swap.pairs):
                lost.add(swap.request_id)
        for request_id in lost:
            self._lose(record, request_id)
        for swap in (*step.swap_in, *step.swap_out):
            moved += len(swap.pairs) if swap.request_id not in lost else 0
        if self.options.preempt_by is PreemptBy.AUTO:
            self._estimate.observe_copy(moved * self.model.shape.block_bytes, time.perf_counter() - begun)
        record.swapped_in = sum(swap.request_id not in lost for swap in step.swap_in)
        record.swapped_out = sum(swap.request_id not in lost for swap in step.swap_out)

    def _lose(self, record: StepRecord, request_id: str) -> None:
        record.recomputed += 1
        self.scheduler.lost(request_id)

    def _forward(self, step: Step) -> tuple[list[Chunk], torch.Tensor]:
        """Compute the step. Returns its chunks, with the logits behind each."""
        chunks = step.chunks
        if not chunks:
            return [], torch.empty(0)
        if self._cache is not None:
            self._cache.plan_stores(filter(None, map(self._storable, chunks)))
        spans = [
            TokenSpan(
                chunk.sequence.tokens[chunk.begin : chunk.end],
                chunk.begin,
                list(chunk.sequence.table),
                self.blocks.first_token(chunk.sequence),
            )
            for chunk in chunks
        ]
        return chunks, self.model.forward(spans, self._cache)

    def _storable(self, chunk: Chunk) -> tuple[str, Sequence[BlockHash], int, BlockIds] | None:
        """What of this chunk's sequence may be stored: all of it, or the prompt if the request has several sequences,
        which differ behind it."""
        group, sequence = chunk.group, chunk.sequence
        if sequence is not group.sequences[0]:
            return None
        hashes, end = self.blocks.hashes(sequence), chunk.end
        if group.width > 1:
            end = min(end, len(self._requests[group.request_id].prompt))
            hashes = hashes[: end // self.blocks.block_tokens]
        return group.request_id, hashes, end, lambda: list(sequence.table)

    def _end(self, record: StepRecord, ended: StepEnd) -> None:
        record.loaded = len(ended.loaded)
        known = {group.request_id: group for group in self.scheduler.groups}
        for request_id in ended.loaded & known.keys():
            self.scheduler.loaded(request_id)
        for request_id in ended.failed & known.keys():
            self._requests[request_id].loaded_tokens = 0
            self._lose(record, request_id)

    def _choose(self, step: Step, chunks: list[Chunk], logits: torch.Tensor) -> dict[str, list[Next]]:
        """The next tokens of every group that was computed up to its newest token."""
        rows = {id(chunk.sequence): row for row, chunk in enumerate(chunks)}
        outcomes: dict[str, list[Next]] = {}
        for group in {chunk.group.request_id: chunk.group for chunk in step.chunks if chunk.samples}.values():
            own = logits[[rows[id(sequence)] for sequence in group.sequences]]
            outcomes[group.request_id] = [
                Next(group.sequences[growth.parent].sequence_id, growth.token, growth.ends)
                for growth in self._requests[group.request_id].generation.choose(own)
            ]
        return outcomes

    def _finish(self, group: SequenceGroup) -> RequestOutput:
        request = self._requests.pop(group.request_id)
        params = None
        if self._cache is not None:
            sequence = (group.ended or group.sequences)[0]
            hashes, computed = self.blocks.hashes(sequence), sequence.computed
            if group.width > 1:
                computed = min(computed, len(request.prompt))
                hashes = hashes[: computed // self.blocks.block_tokens]
            done = not group.reason and not sequence.on_host
            params = self._cache.finished(group.request_id, hashes, computed, sequence.table, store_rest=done)
        outputs = request.generation.outputs
        texts = [self.model.decode(tokens) for tokens in outputs] if request.is_text else []
        return RequestOutput(
            group.request_id,
            request.prompt,
            outputs,
            texts,
            request.local_tokens,
            request.loaded_tokens,
            params,
            group.reason,
        )

    def _note(self, record: StepRecord, step: Step) -> None:
        record.prefill_tokens = sum(chunk.end - chunk.begin for chunk in step.prefill)
        record.decode_tokens = len(step.decode)
        record.copied = len(step.copy)
        record.recomputed = len(step.preempted) - len(step.swap_out)
        record.device_blocks = self.blocks.device.count - self.blocks.device.free_count
        record.host_blocks = self.blocks.host.count - self.blocks.host.free_count

    def _observe(self, record: StepRecord) -> None:
        for name in ("swapped_in", "swapped_out", "recomputed", "copied", "prefill_tokens", "decode_tokens"):
            self.counters[name] += getattr(record, name)
        if self.options.preempt_by is PreemptBy.AUTO and not record.decode_tokens:
            self._estimate.observe_prefill(record.prefill_tokens, record.seconds["forward"])

    # -- the rest ----

    def forget(self) -> None:
        """Forget the engine's own prefixes, so that the next prompt is found in the pool or not at all."""
        self.blocks.device.forget(range(self.blocks.device.count))

    def all_counters(self) -> Counter[str]:
        """Everything counted since the start, the cache's own counters among it."""
        return self.counters + (Counter() if self._cache is None else self._cache.all_counters())

    def close(self) -> None:
        """End all requests and detach. Blocks for seconds at most. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._cache is not None:
            self._cache.close()
        if self._shared is not None and self._shared.memory is not None:
            self._shared.memory.close()

    def __enter__(self) -> ReferenceEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
