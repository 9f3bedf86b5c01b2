"""What a step of the reference engine runs, in which order, and what it takes from whom when there is too little."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvservice.core.transitions import InvalidTransition
from kvservice.engine.blocks import BlockAllocator, PagedMemory, Room
from kvservice.engine.schedule import Found, GroupEvent, GroupState, Next, Scheduler, SequenceGroup, Step, SwapEstimate
from kvservice.errors import InvalidRequest
from tests.property.paged_world import PagedWorld

ALWAYS_SWAP = (float("inf"), 1.0)
NEVER_SWAP = (1.0, float("inf"))


class Bench:
    """A scheduler, and bytes that judge themselves. Each sequence goes on with token 7."""

    def __init__(
        self,
        blocks: int = 8,
        host: int = 8,
        *,
        speeds: tuple[float | None, float | None] = ALWAYS_SWAP,
        tokens_max: int = 64,
        sequences_max: int = 8,
        chunked: bool = True,
        watermark: float = 0.0,
        matched: Callable[[str, int, int], Found] = lambda request_id, local, total: Found(),
    ) -> None:
        device, spare = BlockAllocator("device", range(blocks)), BlockAllocator("host", range(100, 100 + host))
        self.memory = PagedMemory(device, spare, 4, watermark=watermark)
        self.world = PagedWorld(self.memory)
        self.scheduler = Scheduler(
            self.memory,
            SwapEstimate(1, *speeds),
            tokens_max=tokens_max,
            sequences_max=sequences_max,
            chunked=chunked,
            matched=matched,
        )

    def add(self, name: str, count: int, *, width: int = 1, length_max: int = 100) -> SequenceGroup:
        """A prompt of its own of `count` tokens."""
        first = 1000 * len(self.scheduler.groups)
        return self.scheduler.add(name, range(first, first + count), width=width, length_max=length_max)

    def step(self, outcome: Callable[[SequenceGroup], list[Next]] | None = None) -> Step:
        step = self.scheduler.schedule()
        self.world.perform(step)
        groups = {chunk.group.request_id: chunk.group for chunk in step.chunks if chunk.samples}
        self.scheduler.commit({name: (outcome or going_on)(group) for name, group in groups.items()})
        self.scheduler.free_finished()
        self.scheduler.check_invariants()
        self.memory.check_invariants(
            [one for group in self.scheduler.groups for one in (*group.sequences, *group.ended)]
        )
        return step


def going_on(group: SequenceGroup) -> list[Next]:
    return [Next(one.sequence_id, 7, len(one.tokens) + 1 >= group.length_max) for one in group.sequences]


def forking(count: int) -> Callable[[SequenceGroup], list[Next]]:
    return lambda group: [Next(0, 20 + number) for number in range(count)]


def names(step: Step) -> tuple[list[str], list[str]]:
    return [each.group.request_id for each in step.prefill], [each.group.request_id for each in step.decode]


def test_prompts_are_computed_and_then_decoded() -> None:
    bench = Bench()
    bench.add("a", 5)
    bench.add("b", 3)
    assert names(bench.step()) == (["a", "b"], [])
    assert names(bench.step()) == ([], ["a", "b"])
    assert bench.scheduler.groups[0].sequences[0].tokens[-2:] == [7, 7]


def test_a_request_ends_and_its_blocks_are_free() -> None:
    bench = Bench()
    bench.add("a", 5, length_max=7)
    bench.step()
    bench.step()
    assert bench.scheduler.groups == []
    assert bench.memory.device.free_count == 8


def test_a_long_prompt_takes_several_steps() -> None:
    bench = Bench(tokens_max=8, sequences_max=2)
    bench.add("a", 3)
    bench.step()
    bench.add("b", 20)
    spans = []
    for _ in range(4):
        step = bench.step()
        assert step.tokens <= 8
        spans += [(chunk.begin, chunk.end, chunk.samples) for chunk in step.prefill]
        assert names(step)[1][:1] == ["a"], "a prompt does not hold up those that decode"
    assert spans == [(0, 7, False), (7, 14, False), (14, 20, True)]


def test_without_chunks_a_prompt_is_computed_at_once() -> None:
    bench = Bench(tokens_max=12, sequences_max=2, chunked=False)
    with pytest.raises(InvalidRequest, match="allow chunks"):
        bench.add("long", 9, length_max=11)
    bench.add("a", 7, length_max=10)
    bench.add("b", 7, length_max=10)
    assert names(bench.step()) == (["a"], [])
    assert names(bench.step()) == (["b"], ["a"])


def test_sequences_are_counted_by_their_width() -> None:
    bench = Bench(sequences_max=4)
    for name, width in (("a", 3), ("b", 2), ("c", 1)):
        bench.add(name, 2, width=width)
    assert names(bench.step()) == (["a"], []), "b does not fit, and c does not pass it"
    with pytest.raises(InvalidRequest, match="sequences_max=4"):
        bench.add("d", 2, width=5)


def test_samples_share_the_prompt_and_copy_on_write() -> None:
    bench = Bench()
    group = bench.add("a", 6, width=3)
    bench.step(forking(3))
    assert [one.tokens[-1] for one in group.sequences] == [20, 21, 22]
    assert len({tuple(one.table) for one in group.sequences}) == 1
    step = bench.step()
    assert (len(step.copy), names(step)) == (2, ([], ["a"] * 3))
    assert len({one.table[0] for one in group.sequences}) == 1
    assert len({one.table[1] for one in group.sequences}) == 3


def test_beams_are_dropped_and_forked() -> None:
    bench = Bench()
    group = bench.add("a", 6, width=2)
    bench.step(forking(2))
    bench.step(lambda group: [Next(1, 50), Next(1, 51)])
    assert [one.tokens[6:] for one in group.sequences] == [[21, 50], [21, 51]]
    assert [one.sequence_id for one in group.sequences] == [1, 2]
    bench.step(lambda group: [Next(2, 60, True), Next(1, 61)])
    assert [one.tokens[6:] for one in group.sequences] == [[21, 50, 61]]
    assert [one.tokens[6:] for one in group.ended] == [[21, 51, 60]]
    bench.step(lambda group: [])
    assert group.state is GroupState.FINISHED, "a search that is over ends all"
    assert [one.tokens[6:] for one in group.ended] == [[21, 51, 60], [21, 50, 61]]
    assert bench.memory.device.free_count == 8


@pytest.mark.parametrize("wrong", [[Next(5, 1)], [Next(0, 1), Next(0, 2), Next(0, 3)]], ids=["unknown", "too many"])
def test_an_outcome_that_does_not_fit_is_refused(wrong: list[Next]) -> None:
    bench = Bench()
    bench.add("a", 6, width=2)
    bench.scheduler.schedule()
    with pytest.raises(InvalidRequest, match="request a has the sequences"):
        bench.scheduler.commit({"a": wrong})
    with pytest.raises(InvalidRequest, match="no outcome for"):
        bench.scheduler.commit({})
    bench.scheduler.commit({"a": [Next(0, 1)]})


def test_the_newest_gives_way_and_comes_back() -> None:
    bench = Bench(blocks=4)
    bench.add("a", 7)
    new = bench.add("b", 7)
    bench.step()
    bench.step()
    step = bench.step()
    assert [swap.request_id for swap in step.swap_out] == ["b"]
    assert (new.state, names(step)) == (GroupState.SWAPPED, ([], ["a"]))
    assert all(one.on_host for one in new.sequences)
    bench.scheduler.abort("a")
    bench.scheduler.free_finished()
    step = bench.step()
    assert [swap.request_id for swap in step.swap_in] == ["b"]
    assert (step.swap_out, names(step)) == ([], ([], ["b"]))


def test_of_three_the_newest_gives_way() -> None:
    bench = Bench(blocks=6)
    groups = [bench.add(name, 7) for name in ("a", "b", "c")]
    while not (step := bench.step()).swap_out:
        pass
    assert [swap.request_id for swap in step.swap_out] == ["c"]
    assert names(step) == ([], ["a", "b"])
    assert [group.state for group in groups] == [GroupState.RUNNING, GroupState.RUNNING, GroupState.SWAPPED]


def test_a_step_that_swaps_out_swaps_nothing_in() -> None:
    """The block that a swap-out frees is read after the swap-ins are written. Here c is loaded while b is swapped out,
    and when c has to go there is room for b, in blocks that are still to be read."""
    bench = Bench(matched=lambda request_id, local, total: Found(12 if request_id == "c" else 0))
    bench.add("a", 7, length_max=20)
    swapped, loaded = bench.add("b", 7, length_max=20), bench.add("c", 14, length_max=20)
    while not bench.step().swap_out:
        pass
    assert (swapped.state, loaded.state) == (GroupState.SWAPPED, GroupState.LOADING)
    bench.world.write(loaded.sequences[0], 0, 12)
    bench.scheduler.loaded("c")
    while not (step := bench.step()).swap_out:
        assert not step.swap_in
    assert [swap.request_id for swap in step.swap_out] == ["c"]
    assert bench.memory.can_swap_in(swapped.sequences) is Room.OK, "it would fit"
    assert step.swap_in == []
    assert [swap.request_id for swap in bench.step().swap_in] == ["b"]


def test_an_older_prompt_leaves_tokens_to_those_that_decode() -> None:
    bench = Bench(tokens_max=8, sequences_max=2, matched=lambda name, local, total: Found(4 if name == "old" else 0))
    old = bench.add("old", 24, length_max=30)
    bench.add("new", 3, length_max=30)
    bench.step()
    bench.world.write(old.sequences[0], 0, 4)
    bench.scheduler.loaded("old")
    step = bench.step()
    assert [(chunk.begin, chunk.end) for chunk in step.prefill] == [(4, 11)]
    assert names(step)[1] == ["new"]


def test_a_fork_is_swapped_whole() -> None:
    bench = Bench(blocks=6)
    bench.add("a", 7)
    group = bench.add("b", 6, width=2)
    bench.step(lambda group: forking(2)(group) if group.width == 2 else going_on(group))
    while not bench.step().swap_out:
        pass
    assert group.state is GroupState.SWAPPED
    assert [one.on_host for one in group.sequences] == [True, True]


def test_what_is_cheaper_to_compute_is_not_swapped() -> None:
    bench = Bench(blocks=4, speeds=NEVER_SWAP)
    bench.add("a", 7)
    group = bench.add("b", 7)
    bench.step()
    bench.step()
    step = bench.step()
    assert (step.swap_out, step.preempted, group.state) == ([], [group], GroupState.WAITING)


def test_without_room_on_the_host_it_is_computed_again() -> None:
    bench = Bench(blocks=4, host=1)
    bench.add("a", 7, length_max=12)
    group = bench.add("b", 7, length_max=12)
    bench.step()
    bench.step()
    assert bench.step().swap_out == []
    assert group.state is GroupState.WAITING
    while bench.scheduler.groups:
        bench.step()
    assert group.ended[0].tokens[7:] == [7] * 5


def test_a_fork_that_is_computed_again_shares_again() -> None:
    bench = Bench(blocks=7, host=0)
    bench.add("a", 9, length_max=16)
    group = bench.add("b", 9, width=2, length_max=14)
    bench.step(lambda group: forking(2)(group) if group.width == 2 else going_on(group))
    while group.state is GroupState.RUNNING:
        bench.step()
    assert group.state is GroupState.WAITING
    assert len(group.sequences) == 2
    while group.state is not GroupState.RUNNING or not group.is_caught_up:
        bench.step()
    first, second = group.sequences
    assert first.table[:2] == second.table[:2]
    while bench.scheduler.groups:
        bench.step()
    assert sorted(one.tokens[9] for one in group.ended) == [20, 21]


def test_a_fork_is_loaded_before_its_step_or_not_at_all() -> None:
    """Its other sequences share blocks that have to be there before they are computed."""
    bench = Bench(blocks=7, host=0, matched=lambda request_id, local, total: Found(8 - local, layered=True))
    bench.add("a", 9, length_max=16)
    group = bench.add("b", 9, width=2, length_max=14)
    admitted = []
    while bench.scheduler.groups:
        step = bench.scheduler.schedule()
        for each in step.admitted:
            admitted += [each.external_tokens] if each.group is group else []
            bench.world.write(each.group.sequences[0], each.local_tokens, each.local_tokens + each.external_tokens)
        bench.world.perform(step)
        sampled = {chunk.group.request_id: chunk.group for chunk in step.chunks if chunk.samples}
        bench.scheduler.commit(
            {
                name: forking(2)(one) if one is group and one.next_id == 1 else going_on(one)
                for name, one in sampled.items()
            }
        )
        bench.scheduler.free_finished()
        if group.state is GroupState.WAITING:
            bench.memory.device.forget(range(7))
    assert admitted[0] == 8
    assert set(admitted[1:]) == {0}


def test_those_that_were_swapped_come_before_those_that_wait() -> None:
    bench = Bench(blocks=4)
    bench.add("a", 7, length_max=12)
    bench.add("b", 7, length_max=12)
    while not bench.step().swap_out:
        pass
    bench.add("c", 2, length_max=4)
    while not (step := bench.step()).swap_in:
        assert not step.admitted, "c would fit, but b was first"


def test_who_can_never_run_is_refused_at_once() -> None:
    bench = Bench(blocks=8, watermark=0.25)
    with pytest.raises(InvalidRequest, match="needs 7 blocks, of 8 with 2 kept free"):
        bench.add("a", 25)
    bench.add("a", 24)
    for wrong in ({"count": 0}, {"count": 3, "length_max": 3}, {"count": 3, "width": 0}):
        with pytest.raises(InvalidRequest):
            bench.add("b", **wrong)
    with pytest.raises(InvalidRequest, match="choose another id"):
        bench.add("a", 3)


def test_who_grows_out_of_the_device_ends_with_a_reason() -> None:
    bench = Bench(blocks=2)
    group = bench.add("a", 7)
    while not (step := bench.step()).refused:
        assert step.decode or step.prefill
    assert group.state is GroupState.FINISHED
    assert "needs 3 blocks, of 2" in group.reason
    assert group.sequences[0].tokens[7:] == [7, 7], "what it has computed so far"
    assert bench.memory.device.free_count == 2


def test_who_is_stuck_alone_ends_instead_of_going_round() -> None:
    """Two sequences that cannot share their prompt again, because its names are always forgotten, do not fit."""
    bench = Bench(blocks=6, host=0)
    group = bench.add("a", 9, width=2)
    bench.step(forking(2))
    while group.state is GroupState.RUNNING and not group.sequences[0].tokens[12:]:
        bench.step()
    bench.scheduler.lost("a")
    for _ in range(50):
        bench.memory.device.forget(range(6))
        bench.step()
    assert group.state is GroupState.FINISHED
    assert bench.memory.device.free_count == 6


def test_a_load_does_not_hold_up_others() -> None:
    found = {"a": Found(4)}
    bench = Bench(matched=lambda request_id, local, total: found.get(request_id, Found()))
    group = bench.add("a", 9)
    bench.add("b", 3)
    step = bench.step()
    assert [(one.group.request_id, one.local_tokens, one.external_tokens) for one in step.admitted] == [
        ("a", 0, 4),
        ("b", 0, 0),
    ]
    assert (group.state, names(step)) == (GroupState.LOADING, (["b"], []))
    bench.world.write(group.sequences[0], 0, 4)
    bench.scheduler.loaded("a")
    assert [(chunk.begin, chunk.end) for chunk in bench.step().prefill] == [(4, 9)]


def test_an_answer_that_is_not_there_holds_up_nobody() -> None:
    found = {"a": Found(wait=True)}
    asked = []

    def matched(request_id: str, local: int, total: int) -> Found:
        asked.append((request_id, local, total))
        return found.get(request_id, Found())

    bench = Bench(matched=matched)
    bench.add("a", 9)
    bench.add("b", 3)
    assert names(bench.step()) == (["b"], [])
    assert asked == [("a", 0, 8), ("b", 0, 2)]
    del found["a"]
    assert names(bench.step()) == (["a"], ["b"])


def test_at_least_the_last_token_is_computed() -> None:
    bench = Bench(matched=lambda request_id, local, total: Found(8, layered=True))
    group = bench.add("a", 8)
    step = bench.scheduler.schedule()
    assert step.admitted[0].external_tokens == 4
    assert group.state is GroupState.RUNNING
    assert [(chunk.begin, chunk.end) for chunk in step.chunks] == [(4, 8)]
    bench.scheduler.commit({"a": [Next(0, 1)]})


def test_a_load_that_failed_is_computed() -> None:
    found = [Found(4), Found()]
    bench = Bench(matched=lambda request_id, local, total: found.pop(0))
    bench.add("a", 9)
    bench.step()
    bench.scheduler.lost("a")
    assert bench.memory.device.free_count == 8
    assert [(chunk.begin, chunk.end) for chunk in bench.step().prefill] == [(0, 9)]


def test_lost_bytes_leave_the_step_that_needs_them() -> None:
    bench = Bench(matched=lambda request_id, local, total: Found(4, layered=True))
    group = bench.add("a", 9)
    bench.add("b", 9)
    step = bench.scheduler.schedule()
    bench.scheduler.lost("a")
    assert names(step) == (["b"], [])
    bench.scheduler.commit({"b": [Next(0, 1)]})
    assert (group.state, group.sequences[0].table) == (GroupState.WAITING, [])
    assert bench.memory.match(group.sequences[0]) == [], "nobody finds what was not loaded"


def test_a_swap_that_was_lost_is_computed_again() -> None:
    bench = Bench(blocks=4)
    bench.add("a", 7, length_max=12)
    group = bench.add("b", 7, length_max=12)
    while not bench.step().swap_out:
        pass
    bench.scheduler.lost("b")
    assert (group.state, bench.memory.host.free_count) == (GroupState.WAITING, 8)
    while bench.scheduler.groups:
        bench.step()
    assert len(group.ended[0].tokens) == 12


def test_an_aborted_load_keeps_its_blocks_until_it_ends() -> None:
    bench = Bench(matched=lambda request_id, local, total: Found(4))
    group = bench.add("a", 9)
    bench.step()
    bench.scheduler.abort("a")
    bench.scheduler.free_finished()
    assert (group.state, bench.memory.device.free_count) == (GroupState.ABANDONED, 5)
    bench.scheduler.loaded("a")
    assert bench.scheduler.free_finished() == [group]
    assert bench.memory.device.free_count == 8


def test_an_abort_during_a_step_ends_it_there() -> None:
    bench = Bench()
    group = bench.add("a", 9)
    step = bench.scheduler.schedule()
    bench.scheduler.abort("a")
    bench.scheduler.abort("nobody")
    assert step.chunks == []
    bench.scheduler.commit({})
    assert (bench.scheduler.free_finished(), group.reason) == ([group], "aborted")


def test_estimates_compare_bytes_with_tokens() -> None:
    estimate = SwapEstimate(block_bytes=1000)
    assert estimate.prefers_swap(1, 4), "nothing is measured yet"
    estimate.observe_copy(8000, 1.0)
    estimate.observe_prefill(100, 1.0)
    assert (estimate.copy_bytes_per_second, estimate.prefill_tokens_per_second) == (8000.0, 100.0)
    assert estimate.prefers_swap(4, 100), "out and in take one second, as 100 tokens do"
    assert not estimate.prefers_swap(4, 99)
    estimate.observe_copy(4000, 1.0)
    assert estimate.copy_bytes_per_second == pytest.approx(6800.0)
    estimate.observe_copy(0, 1.0)
    estimate.observe_prefill(5, 0.0)
    assert (estimate.copy_bytes_per_second, estimate.prefill_tokens_per_second) == (pytest.approx(6800.0), 100.0)


def test_a_change_that_the_table_lacks_is_an_error() -> None:
    group = Bench().add("a", 2)
    with pytest.raises(InvalidTransition, match="request a is waiting, cannot swap_in"):
        group.move(GroupEvent.SWAP_IN)


def test_budgets_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"in \[1, tokens_max=4\], not 5"):
        Bench(tokens_max=4, sequences_max=5)
