"""Which sequences run in a step, and which blocks move before it. Pure.

A request is a group of sequences that share a prompt: one, n samples, or beams. A group is admitted, run, preempted and
swapped as one. Each step serves RUNNING groups first, SWAPPED groups second and WAITING groups last, always in the
order of arrival, so that the oldest makes progress. The shape is that of vLLM's first scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvservice.core.transitions import step as next_state
from kvservice.engine.blocks import PagedMemory, PagedSequence, Pairs, Room
from kvservice.errors import InvalidRequest


class GroupState(Enum):
    WAITING = "waiting"  # holds no blocks
    LOADING = "loading"  # holds blocks that the cache fills meanwhile
    RUNNING = "running"  # holds blocks of the device
    SWAPPED = "swapped"  # holds blocks of the host
    ABANDONED = "abandoned"  # aborted while the cache writes its blocks, which it keeps until that is over
    FINISHED = "finished"


class GroupEvent(Enum):
    ADMIT = "admit"
    LOAD = "load"  # admitted with tokens that the cache brings
    LOADED = "loaded"
    LOSE = "lose"  # bytes that it counted on are gone: it is computed again
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    RECOMPUTE = "recompute"  # preempted, and its blocks are freed
    END = "end"


TRANSITIONS: dict[tuple[GroupState, GroupEvent], GroupState] = {
    (GroupState.WAITING, GroupEvent.ADMIT): GroupState.RUNNING,
    (GroupState.WAITING, GroupEvent.LOAD): GroupState.LOADING,
    (GroupState.WAITING, GroupEvent.END): GroupState.FINISHED,
    (GroupState.LOADING, GroupEvent.LOADED): GroupState.RUNNING,
    (GroupState.LOADING, GroupEvent.LOSE): GroupState.WAITING,
    (GroupState.LOADING, GroupEvent.END): GroupState.ABANDONED,
    (GroupState.ABANDONED, GroupEvent.LOADED): GroupState.FINISHED,
    (GroupState.ABANDONED, GroupEvent.LOSE): GroupState.FINISHED,
    (GroupState.RUNNING, GroupEvent.SWAP_OUT): GroupState.SWAPPED,
    (GroupState.RUNNING, GroupEvent.RECOMPUTE): GroupState.WAITING,
    (GroupState.RUNNING, GroupEvent.LOSE): GroupState.WAITING,
    (GroupState.RUNNING, GroupEvent.END): GroupState.FINISHED,
    (GroupState.SWAPPED, GroupEvent.SWAP_IN): GroupState.RUNNING,
    (GroupState.SWAPPED, GroupEvent.LOSE): GroupState.WAITING,
    (GroupState.SWAPPED, GroupEvent.END): GroupState.FINISHED,
}

WEIGHT = 0.3  # of the newest sample in an average: it follows a changed speed within a handful of copies


@dataclass(slots=True)
class SwapEstimate:
    """Whether to move a group's blocks to the host and back or to compute them again: measured speeds decide.

    Without a sample of both, groups are swapped where there is room, which is what gives samples.
    """

    block_bytes: int
    copy_bytes_per_second: float | None = None
    prefill_tokens_per_second: float | None = None

    def observe_copy(self, byte_count: int, seconds: float) -> None:
        if byte_count > 0 and seconds > 0:
            self.copy_bytes_per_second = _blend(self.copy_bytes_per_second, byte_count / seconds)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self.prefill_tokens_per_second = _blend(self.prefill_tokens_per_second, tokens / seconds)

    def prefers_swap(self, blocks: int, tokens: int) -> bool:
        if self.copy_bytes_per_second is None or self.prefill_tokens_per_second is None:
            return True
        swap_seconds = 2 * blocks * self.block_bytes / self.copy_bytes_per_second  # out and in
        return swap_seconds <= tokens / self.prefill_tokens_per_second


def _blend(average: float | None, sample: float) -> float:
    return sample if average is None else (1 - WEIGHT) * average + WEIGHT * sample


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request. `sequences` live; `ended` ones keep their blocks until the end of the step."""

    request_id: str
    width: int  # sequences that it may have at once
    length_max: int  # tokens of a sequence with its prompt
    sequences: list[PagedSequence]
    state: GroupState = GroupState.WAITING
    ended: list[PagedSequence] = field(default_factory=list)
    next_id: int = 1  # of a sequence
    gave_way_at: int = 0  # its tokens when it was preempted last: alone, and with no more of them, it is stuck
    reason: str = ""  # why it finished, if not by its sequences' ends

    def move(self, event: GroupEvent) -> None:
        self.state = next_state(TRANSITIONS, self.state, event, f"request {self.request_id}")

    @property
    def is_caught_up(self) -> bool:
        """Whether only the newest token of each sequence is left to compute: they are decoded, in lockstep."""
        return all(sequence.table and sequence.missing == 1 for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Found:
    """What the cache has of a request behind what the engine has itself."""

    tokens: int = 0
    layered: bool = False  # they are loaded during the step, which computes the rest
    wait: bool = False  # not known yet: ask again in the next step


Matched = Callable[[str, int, int], Found]  # (request id, tokens found here, tokens that may come from elsewhere)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [begin, end) of a sequence to compute. Their blocks are in its table."""

    group: SequenceGroup
    sequence: PagedSequence
    begin: int
    end: int
    samples: bool  # the logits of the last one are wanted


@dataclass(frozen=True, slots=True)
class Swap:
    request_id: str
    pairs: Pairs


@dataclass(frozen=True, slots=True)
class Admitted:
    group: SequenceGroup
    local_tokens: int  # found in the engine's own blocks
    external_tokens: int  # to load behind them
    layered: bool


@dataclass(slots=True)
class Step:
    """What to do, in this order: swap in, swap out, copy, then prefill and decode in one forward."""

    swap_in: list[Swap] = field(default_factory=list)  # host -> device
    swap_out: list[Swap] = field(default_factory=list)  # device -> host
    copy: Pairs = field(default_factory=list)  # on the device
    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Chunk] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    refused: list[SequenceGroup] = field(default_factory=list)  # they can never run: FINISHED with a reason

    @property
    def chunks(self) -> list[Chunk]:
        return self.prefill + self.decode

    @property
    def tokens(self) -> int:
        return sum(chunk.end - chunk.begin for chunk in self.chunks)

    def drop(self, group: SequenceGroup) -> None:
        self.prefill = [chunk for chunk in self.prefill if chunk.group is not group]
        self.decode = [chunk for chunk in self.decode if chunk.group is not group]


@dataclass(frozen=True, slots=True)
class Next:
    """One sequence behind a step: the sequence it grows from, and its new token."""

    sequence_id: int
    token: int
    ends: bool = False  # with this token


class Scheduler:
    """`schedule` a step, do it, `commit` what it computed. One step at a time."""

    def __init__(
        self,
        memory: PagedMemory,
        estimate: SwapEstimate,
        *,
        tokens_max: int,
        sequences_max: int,
        chunked: bool = True,
        matched: Matched = lambda request_id, local_tokens, total_tokens: Found(),
    ) -> None:
        """
        Args:
            tokens_max: tokens of one step.
            sequences_max: sequences that run at once. At most `tokens_max`, so that all of them fit into a step.
            chunked: a prompt may be computed in several steps.
            matched: asks the cache. It must not block and changes nothing.
        """
        if not 0 < sequences_max <= tokens_max:
            raise InvalidRequest(f"sequences_max must be in [1, tokens_max={tokens_max}], not {sequences_max}")
        self.memory, self.estimate = memory, estimate
        self._tokens_max, self._sequences_max, self._chunked = tokens_max, sequences_max, chunked
        self._matched = matched
        self._groups: dict[str, SequenceGroup] = {}  # in the order of arrival
        self._step: Step | None = None  # under way

    # -- requests come and go ----

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        length_max: int,
        width: int = 1,
        salt: bytes = b"",
    ) -> SequenceGroup:
        """A request that waits from now on. Raises InvalidRequest if it can never run."""
        if request_id in self._groups:
            raise InvalidRequest(f"request {request_id} is here already: choose another id")
        if not tokens or length_max <= len(tokens):
            raise InvalidRequest(
                f"a request has at least one token and room for one more, not {len(tokens)} of {length_max}"
            )
        if not 0 < width <= self._sequences_max:
            raise InvalidRequest(f"{width} sequences at once: at least 1, at most sequences_max={self._sequences_max}")
        if not self._chunked and length_max + self._sequences_max > self._tokens_max:
            raise InvalidRequest(
                f"without chunks a step must hold {length_max} tokens and one of each other sequence, and it holds "
                f"tokens_max={self._tokens_max}: raise it, or allow chunks"
            )
        group = SequenceGroup(request_id, width, length_max, [PagedSequence(0, list(tokens), salt)])
        if self.memory.room_for(group.sequences) is Room.NEVER:
            raise InvalidRequest(self._too_large(group))
        self._groups[request_id] = group
        return group

    def abort(self, request_id: str) -> None:
        """End a request in any state. Its blocks are freed with the step; those that a load writes, after the load."""
        group = self._groups.get(request_id)
        if group is None or group.state in (GroupState.FINISHED, GroupState.ABANDONED):
            return
        group.reason = "aborted"
        group.move(GroupEvent.END)
        if self._step is not None:
            self._step.drop(group)

    def loaded(self, request_id: str) -> None:
        """The cache has filled the blocks of this request."""
        group = self._groups[request_id]
        group.move(GroupEvent.LOADED)
        self.memory.written(group.sequences[0], group.sequences[0].computed)  # also for others, if it was aborted

    def lost(self, request_id: str) -> None:
        """Bytes that this request counts on did not come: of a load, or of a swap. All of it is computed again.

        Call it before `commit` if the step under way needs them.
        """
        group = self._groups[request_id]
        if group.state is not GroupState.FINISHED:  # aborted meanwhile
            self._recompute(group, GroupEvent.LOSE)

    def _recompute(self, group: SequenceGroup, event: GroupEvent) -> None:
        """Free all that the group has. It waits, unless it is abandoned."""
        group.move(event)
        for sequence in group.sequences:
            self.memory.free(sequence)
        if self._step is not None:
            self._step.drop(group)

    @property
    def groups(self) -> Sequence[SequenceGroup]:
        """All that are not forgotten, in the order of arrival."""
        return list(self._groups.values())

    def of(self, *states: GroupState) -> list[SequenceGroup]:
        return [group for group in self._groups.values() if group.state in states]

    @property
    def finished(self) -> list[SequenceGroup]:
        return self.of(GroupState.FINISHED)

    def free_finished(self) -> list[SequenceGroup]:
        """Free the blocks of the sequences that ended, and forget the groups that finished, which it returns."""
        assert self._step is None, "a step is under way"
        finished = self.finished
        for group in self._groups.values():
            for sequence in group.ended:
                if sequence.table:
                    self.memory.free(sequence)
        for group in finished:
            for sequence in group.sequences:
                self.memory.free(sequence)
            del self._groups[group.request_id]
        return finished

    # -- a step ----

    def schedule(self) -> Step:
        """The next step. It may have nothing to compute: then wait for a load, or for a request."""
        assert self._step is None, "commit the step before"
        step = self._step = Step()
        left = self._run(step)
        # A step that preempts brings nothing in: there is no room, and a block that a swap-out frees is read after the
        # swap-ins are written.
        if not step.preempted:
            left = self._swap_in(step, left)
            if not self.of(GroupState.SWAPPED):
                self._admit(step, left)
        return step

    def _run(self, step: Step) -> int:
        """Schedule the RUNNING groups, and preempt the newest ones while the older ones lack blocks. Returns the tokens
        that are left."""
        left = self._tokens_max
        running = self.of(GroupState.RUNNING)
        while running:
            group = running.pop(0)
            later = sum(len(other.sequences) for other in running if other.is_caught_up)
            ends = self._next_ends(group, left - later)
            while ends and not self.memory.can_append(ends):
                victim = running.pop() if running else group
                self._preempt(step, victim)
                if victim is group:
                    ends = []
            left -= self._take(step, group, ends)
        return left

    def _next_ends(self, group: SequenceGroup, budget: int) -> list[tuple[PagedSequence, int]]:
        """What of the group runs next: a chunk of the first sequence that is behind, or the newest token of each.

        A fork that was preempted is computed again one sequence after the other, so that they share blocks again. The
        newest tokens come in one step, when all are there.
        """
        forked = len(group.sequences) > 1
        for sequence in () if group.is_caught_up else group.sequences:
            if not sequence.table:
                self.memory.share_prefix(sequence)
            wanted = sequence.missing - forked
            if wanted > 0:
                count = min(wanted, budget) if self._chunked or wanted <= budget else 0
                return [(sequence, sequence.computed + count)] if count > 0 else []
        return [(sequence, len(sequence.tokens)) for sequence in group.sequences if len(group.sequences) <= budget]

    def _take(self, step: Step, group: SequenceGroup, ends: Sequence[tuple[PagedSequence, int]]) -> int:
        """Add these chunks to the step, with blocks for them. Returns their tokens."""
        chunks = step.decode if group.is_caught_up else step.prefill
        tokens = 0
        for sequence, end in ends:
            step.copy += self.memory.append(sequence, end)
            chunks.append(Chunk(group, sequence, sequence.computed, end, end == len(sequence.tokens)))
            tokens += end - sequence.computed
        return tokens

    def _preempt(self, step: Step, group: SequenceGroup) -> None:
        """Take the blocks of a RUNNING group, by the cheaper way. If it cannot even run alone, it ends."""
        memory = self.memory
        size = sum(len(one.tokens) for one in group.sequences)
        held = {block_id for one in group.sequences for block_id in one.held}
        is_stuck = size == group.gave_way_at and held >= memory.device.in_use().keys()
        if is_stuck or memory.can_allocate(0, total=memory.required(group.sequences)) is Room.NEVER:
            self._refuse(step, group)
            return
        group.gave_way_at = size
        step.preempted.append(group)
        blocks = len(memory.blocks_of(group.sequences))
        tokens = memory.block_tokens * blocks
        if memory.can_swap_out(group.sequences) and self.estimate.prefers_swap(blocks, tokens):
            group.move(GroupEvent.SWAP_OUT)
            step.swap_out.append(Swap(group.request_id, memory.swap_out(group.sequences)))
        else:
            self._recompute(group, GroupEvent.RECOMPUTE)

    def _refuse(self, step: Step, group: SequenceGroup) -> None:
        group.reason = self._too_large(group)
        self._recompute(group, GroupEvent.END)
        step.refused.append(group)

    def _too_large(self, group: SequenceGroup) -> str:
        return (
            f"it needs {self.memory.required(group.sequences)} blocks, of {self.memory.device.count} with "
            f"{self.memory.watermark_blocks} kept free: use a larger device pool"
        )

    def _sequences_free(self) -> int:
        """While a group is swapped out, none is admitted, so that it finds its place again."""
        admitted = self.of(GroupState.RUNNING, GroupState.LOADING, GroupState.SWAPPED)
        return self._sequences_max - sum(group.width for group in admitted)

    def _swap_in(self, step: Step, left: int) -> int:
        for group in self.of(GroupState.SWAPPED):
            room = self.memory.can_swap_in(group.sequences)
            if room is Room.NEVER:  # its sequences share less than they could
                self._recompute(group, GroupEvent.LOSE)
                continue
            if room is Room.LATER or len(group.sequences) > left:
                break
            group.move(GroupEvent.SWAP_IN)
            step.swap_in.append(Swap(group.request_id, self.memory.swap_in(group.sequences)))
            left -= self._take(step, group, self._next_ends(group, left))
        return left

    def _admit(self, step: Step, left: int) -> None:
        for group in self.of(GroupState.WAITING):
            sequence = group.sequences[0]
            local = len(self.memory.match(sequence)) * self.memory.block_tokens
            least = 1 if self._chunked else len(sequence.tokens) - local
            if least > left or group.width > self._sequences_free():
                break
            room = self.memory.room_for(group.sequences)
            if room is Room.NEVER:
                self._refuse(step, group)
            elif room is Room.LATER:
                break
            else:
                left -= self._admit_one(step, group, local, left)

    def _admit_one(self, step: Step, group: SequenceGroup, local: int, left: int) -> int:
        """Admit a group that there is room for, unless the cache has not answered. Returns the tokens it takes."""
        sequence, size = group.sequences[0], self.memory.block_tokens
        most = len(sequence.tokens) - 1
        found = self._matched(group.request_id, local, most)
        if found.wait:
            return 0
        external = max(0, min(found.tokens, most - local))
        if external < found.tokens // size * size:
            external = external // size * size  # a part of a promise ends with a block, or within its tail
        if found.layered and len(group.sequences) > 1:
            external = 0  # the other sequences would have to share blocks that are not there before the step
        shared = self.memory.share_prefix(sequence, tail=not external)
        step.admitted.append(Admitted(group, shared, external, found.layered))
        # All blocks of the first sequence at once, while there is room.
        step.copy += self.memory.append(sequence, len(sequence.tokens))
        sequence.computed += external
        if external and not found.layered:
            group.move(GroupEvent.LOAD)
            return 0
        group.move(GroupEvent.ADMIT)
        return self._take(step, group, self._next_ends(group, left))

    def commit(self, outcomes: Mapping[str, Iterable[Next]]) -> None:
        """Note what the step computed: for each request with a chunk that samples, its sequences from now on.

        No sequences: all of them end as they are. Raises InvalidRequest, without effect, if an outcome is missing or
        does not fit its request.
        """
        step = self._step
        assert step is not None, "schedule a step first"
        sampled = {chunk.group.request_id: chunk.group for chunk in step.chunks if chunk.samples}
        if not sampled.keys() <= outcomes.keys():
            raise InvalidRequest(f"no outcome for {sorted(sampled.keys() - outcomes.keys())}")
        listed = {request_id: list(outcomes[request_id]) for request_id in sampled}
        for request_id, group in sampled.items():
            _check(group, listed[request_id])
        self._step = None
        for chunk in step.chunks:
            self.memory.written(chunk.sequence, chunk.end)
        for request_id, group in sampled.items():
            self._grow(group, listed[request_id])

    def _grow(self, group: SequenceGroup, outcome: Sequence[Next]) -> None:
        parents = {sequence.sequence_id: sequence for sequence in group.sequences}
        taken: set[int] = set()
        grown: list[tuple[PagedSequence, Next]] = []
        for each in outcome:
            sequence = parents[each.sequence_id]
            if each.sequence_id in taken:
                sequence = self.memory.fork(sequence, group.next_id)
                group.next_id += 1
            taken.add(each.sequence_id)
            grown.append((sequence, each))
        for sequence in parents.values():
            if not outcome:
                group.ended.append(sequence)
            elif sequence.sequence_id not in taken:
                self.memory.free(sequence)
        group.sequences = []
        for sequence, each in grown:
            sequence.tokens.append(each.token)
            (group.ended if each.ends else group.sequences).append(sequence)
        if not group.sequences:
            group.move(GroupEvent.END)

    def check_invariants(self) -> None:
        """No group is half anywhere, and no block is lost."""
        for group in self._groups.values():
            states = {(sequence.on_host, bool(sequence.table)) for sequence in group.sequences}
            if group.state is GroupState.WAITING:
                assert states == {(False, False)}
            if group.state is GroupState.SWAPPED:
                assert {on_host for on_host, _ in states} == {True}
            if group.state in (GroupState.RUNNING, GroupState.LOADING):
                assert {on_host for on_host, _ in states} == {False}
            assert len(group.sequences) <= group.width
        assert self._sequences_free() >= 0


def _check(group: SequenceGroup, outcome: Sequence[Next]) -> None:
    known = {sequence.sequence_id for sequence in group.sequences}
    live = sum(not each.ends for each in outcome)
    if not {each.sequence_id for each in outcome} <= known or live > group.width:
        raise InvalidRequest(
            f"request {group.request_id} has the sequences {sorted(known)} and room for {group.width}: the outcome "
            f"{outcome} of the step does not fit"
        )
