"""The rules that every DirectoryPort must keep. Subclass, give it a `bench` fixture with two started nodes, and pytest
runs the rules against it.

`DirectoryContract` is what a shard needs to find blocks. `HandoverDirectoryContract` adds what a leaving shard asks. A
directory is soft: it may learn of a change later, so every rule waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvservice.core.actions import Announce, Retract
from kvservice.core.block.keys import span_route
from kvservice.core.messages import Holder, HolderRun
from kvservice.lookup.client import LookupAnswer
from kvservice.pool.remote import DirectoryPort
from kvservice.testing.builders import make_chain
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, NodeId, SpanRoute

TIMEOUT_SECONDS = 2.0  # For one lookup, which takes milliseconds. Then the rule fails.
CHAIN = make_chain(8)


@dataclass(slots=True)
class DirectoryNode:
    """A node and what it holds. `held` is its inventory, from which it tells a directory that forgot it."""

    holder: Holder
    directory: DirectoryPort
    held: dict[BlockKey, SpanRoute] = field(default_factory=dict)

    def announce(self, chain: Sequence[BlockKey], *positions: int) -> None:
        """The blocks of the chain at these positions, or all of them, are now here."""
        added = {chain[position]: span_route(chain, position) for position in positions or range(len(chain))}
        self.held.update(added)
        self.directory.tell([Announce(key, route) for key, route in added.items()])

    def retract(self, *keys: BlockKey) -> None:
        self.directory.tell([Retract(key, self.held.pop(key)) for key in keys])

    async def resolve(self, chain: Sequence[BlockKey], start: int = 0, exclude: NodeId | None = None) -> LookupAnswer:
        return await self.directory.lookup.resolve(chain, start, TIMEOUT_SECONDS, exclude)

    async def finds(self, wanted: Sequence[HolderRun], chain: Sequence[BlockKey], start: int = 0) -> None:
        """Wait until exactly these runs are known."""
        answer: LookupAnswer | None = None

        async def are_known() -> bool:
            nonlocal answer
            answer = await self.resolve(chain, start)
            return answer.complete and answer.runs == tuple(wanted)

        await eventually_async(are_known, f"the directory to answer {wanted}", detail=lambda: answer)


@dataclass(slots=True)
class DirectoryBench:
    here: DirectoryNode
    there: DirectoryNode
    play: Callable[[Coroutine[Any, Any, None]], None]  # runs a coroutine to its end on the loop that both nodes use


class DirectoryContract:
    def test_an_empty_directory_knows_no_holder(self, bench: DirectoryBench) -> None:
        bench.play(bench.here.finds((), CHAIN))

    def test_announced_blocks_are_found_at_their_node(self, bench: DirectoryBench) -> None:
        bench.there.announce(CHAIN)
        bench.play(bench.here.finds([HolderRun(0, 8, (bench.there.holder,))], CHAIN))

    def test_indices_of_an_answer_are_those_of_the_chain(self, bench: DirectoryBench) -> None:
        """Whatever index the lookup began at."""
        bench.there.announce(CHAIN)
        bench.play(bench.here.finds([HolderRun(3, 5, (bench.there.holder,))], CHAIN, start=3))

    def test_a_block_that_nobody_has_is_a_gap(self, bench: DirectoryBench) -> None:
        bench.there.announce(CHAIN, 0, 1, 4, 5, 6)
        holders = (bench.there.holder,)
        bench.play(bench.here.finds([HolderRun(0, 2, holders), HolderRun(4, 3, holders)], CHAIN))

    def test_a_retracted_block_is_not_found_any_more(self, bench: DirectoryBench) -> None:
        async def scenario() -> None:
            bench.there.announce(CHAIN)
            await bench.here.finds([HolderRun(0, 8, (bench.there.holder,))], CHAIN)
            bench.there.retract(*CHAIN[2:])
            await bench.here.finds([HolderRun(0, 2, (bench.there.holder,))], CHAIN)

        bench.play(scenario())

    def test_a_node_that_is_excluded_is_not_named(self, bench: DirectoryBench) -> None:
        """A shard asks which other nodes have its blocks."""

        async def scenario() -> None:
            bench.here.announce(CHAIN, 0, 1, 2)
            bench.there.announce(CHAIN, 2, 3)
            names = {bench.here.holder.node_id: 3, bench.there.holder.node_id: 2}

            async def are_known() -> bool:
                found = {}
                for name in names:
                    other = next(node for node in names if node != name)
                    answer = await bench.here.resolve(CHAIN, exclude=other)
                    found[name] = sum(run.count for run in answer.runs)
                return found == names

            await eventually_async(are_known, "each node's own blocks")

        bench.play(scenario())

    def test_a_live_node_is_found_by_its_name(self, bench: DirectoryBench) -> None:
        async def scenario() -> None:
            bench.there.announce(CHAIN)

            async def holder() -> Holder | None:
                return await bench.here.directory.lookup.find_node(bench.there.holder.node_id, TIMEOUT_SECONDS)

            assert await eventually_async(holder, "the other node") == bench.there.holder
            assert await bench.here.directory.lookup.find_node(NodeId("nobody"), TIMEOUT_SECONDS) is None

        bench.play(scenario())

    def test_a_node_knows_itself(self, bench: DirectoryBench) -> None:
        assert bench.here.directory.self_holder() == bench.here.holder

    def test_a_node_may_leave_more_than_once(self, bench: DirectoryBench) -> None:
        async def scenario() -> None:
            await bench.there.directory.leave()
            await bench.there.directory.leave()

        bench.play(scenario())


class HandoverDirectoryContract(DirectoryContract):
    def test_every_live_node_is_a_member(self, bench: DirectoryBench) -> None:
        wanted = {bench.here.holder, bench.there.holder}

        async def are_members() -> bool:
            return set(await bench.here.directory.lookup.members(TIMEOUT_SECONDS)) == wanted

        async def scenario() -> None:
            await eventually_async(are_members, f"{wanted} in the directory")

        bench.play(scenario())

    def test_holders_of_single_blocks_are_named(self, bench: DirectoryBench) -> None:
        blocks = [(CHAIN[position], span_route(CHAIN, position)) for position in (1, 5)]

        async def are_named() -> bool:
            found = await bench.here.directory.lookup.holders_of(blocks, TIMEOUT_SECONDS)
            return {key: holders for key, holders in found.items() if holders} == {CHAIN[5]: (bench.there.holder,)}

        async def scenario() -> None:
            bench.there.announce(CHAIN, 5)
            await eventually_async(are_named, "the holder of one block")

        bench.play(scenario())

    def test_a_node_that_left_is_forgotten_at_once(self, bench: DirectoryBench) -> None:
        """It does not wait until heartbeats are missed."""

        async def scenario() -> None:
            bench.there.announce(CHAIN)
            await bench.here.finds([HolderRun(0, 8, (bench.there.holder,))], CHAIN)
            await bench.there.directory.leave()
            assert (await bench.here.resolve(CHAIN)).runs == ()
            assert await bench.here.directory.lookup.find_node(bench.there.holder.node_id, TIMEOUT_SECONDS) is None

        bench.play(scenario())
