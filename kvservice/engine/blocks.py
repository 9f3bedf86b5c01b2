"""Paged memory: which block of which device holds the K/V of which tokens. Pure; moves no bytes.

A sequence has a block table: the K/V of its token `i` is in row `i % block_tokens` of block `table[i // block_tokens]`.
Blocks are shared with reference counts, by forks and by equal prefixes, and copied before one of several writes. What
has to be moved is returned as pairs of block ids. The idea is that of PagedAttention (Kwon et al., 2023) and of vLLM's
first block manager; blocks are found by the same chained hashes as in the cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvservice.core.block.keys import chain_hashes
from kvservice.errors import Exhausted, InvalidRequest
from kvservice.units import BlockHash, div_ceil

Pairs = list[tuple[int, int]]  # (source, target): block ids; which devices they belong to depends on the list

# (tokens behind what has a name, tokens of a block, root, name of what comes before) -> names of the full blocks
NameBlocks = Callable[[Sequence[int], int, bytes, BlockHash | None], list[BlockHash]]

RELEASED = -1  # in a block table: the block was behind the sliding window and is gone. Never an id, so never a slot


class Room(Enum):
    OK = "ok"
    LATER = "later"  # once others have freed blocks
    NEVER = "never"  # not even alone


def slot_mapping(table: Sequence[int], begin: int, end: int, block_tokens: int) -> list[int]:
    """The slots of the tokens [begin, end): rows of the device's K/V seen as [blocks * block_tokens, ...].

    Raises IndexError for a token that the table has no block for.
    """
    slots = []
    for token in range(begin, end):
        block = table[token // block_tokens]
        if block == RELEASED:
            raise IndexError(f"token {token} is behind the sliding window, and its block was released")
        slots.append(block * block_tokens + token % block_tokens)
    return slots


def padded(tables: Sequence[Sequence[int]], width: int = 0, fill: int = 0) -> list[list[int]]:
    """The tables of a batch as rows of one length, as attention kernels read them: [sequences, longest or `width`]."""
    width = max(width, *map(len, tables), 0)
    return [[*table, *[fill] * (width - len(table))] for table in tables]


class BlockAllocator:
    """The blocks of one device: who counts on them, and which free one is next. Ids and counts only.

    A free block that has a name keeps it until it is given out again, so a freed prefix can be hit. Blocks without a
    name are given out first, then those that were freed first.
    """

    def __init__(self, device: str, block_ids: Iterable[int]) -> None:
        """`block_ids` are given out in their order while none has been freed."""
        self.device = device
        self._refs = dict.fromkeys(block_ids, 0)
        self._free = OrderedDict.fromkeys(self._refs)
        self._blocks: dict[BlockHash, int] = {}
        self._names: dict[int, BlockHash] = {}

    @property
    def count(self) -> int:
        return len(self._refs)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def allocate(self) -> int:
        """A block with one reference and no name. Raises Exhausted if none is free."""
        if not self._free:
            raise Exhausted(f"no free block on {self.device}: all {self.count} are in use", free_blocks=0)
        block_id, _ = self._free.popitem(last=False)
        self.unname(block_id)
        self._refs[block_id] = 1
        return block_id

    def share(self, block_id: int) -> int:
        """One more reference, also to a free block whose name was found. Returns the id."""
        self._free.pop(block_id, None)
        self._refs[block_id] += 1
        return block_id

    def free(self, block_id: int) -> None:
        """One reference less. The block is free after the last one."""
        assert self._refs[block_id] > 0, f"block {block_id} of {self.device} is freed twice"
        self._refs[block_id] -= 1
        if self._refs[block_id] == 0:
            self._free[block_id] = None
            if block_id not in self._names:
                self._free.move_to_end(block_id, last=False)

    # -- the prefix map ----

    def name(self, block_id: int, block_hash: BlockHash) -> None:
        """Let the block be found: it holds what the hash stands for. Of blocks with one content, the first is found."""
        if block_hash not in self._blocks and block_id not in self._names:
            self._blocks[block_hash] = block_id
            self._names[block_id] = block_hash

    def find(self, block_hash: BlockHash) -> int | None:
        return self._blocks.get(block_hash)

    def unname(self, block_id: int) -> None:
        """Let nobody find the block any more: it is written."""
        if block_id in self._names:
            del self._blocks[self._names.pop(block_id)]

    # -- pins: references of copies and of other engines, which outlive a sequence ----

    def pin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.share(block_id)

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.free(block_id)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Let nobody find these blocks any more: their contents are wrong."""
        for block_id in block_ids:
            self.unname(block_id)

    def free_share(self) -> float:
        return self.free_count / self.count if self.count else 0.0

    def in_use(self) -> Counter[int]:
        """The blocks that somebody counts on, with how many do."""
        return Counter({block_id: refs for block_id, refs in self._refs.items() if refs})

    def check_invariants(self) -> None:
        for block_id, refs in self._refs.items():
            assert refs >= 0
            assert (refs == 0) == (block_id in self._free), f"block {block_id} of {self.device} has {refs} references"
        assert {name: block_id for block_id, name in self._names.items()} == self._blocks


@dataclass(slots=True, eq=False)
class PagedSequence:
    """The tokens of one sequence and where their K/V is. PagedMemory changes all but the tokens."""

    sequence_id: int  # unique in its group
    tokens: list[int]
    root: bytes = b""  # separates namespaces of prefixes: a salt
    table: list[int] = field(default_factory=list)  # ids of the device's blocks, or of the host's while on_host
    computed: int = 0  # leading tokens whose K/V is in the blocks, or under way into them
    on_host: bool = False
    hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks, as far as they were asked for
    named: int = 0  # leading blocks that need no name any more

    @property
    def missing(self) -> int:
        """Tokens that are to be computed, with the newest."""
        return len(self.tokens) - self.computed

    @property
    def held(self) -> list[int]:
        """The blocks in its table that it counts on."""
        return [block_id for block_id in self.table if block_id != RELEASED]


class PagedMemory:
    """The block tables of all sequences over the blocks of one device and of its host."""

    def __init__(
        self,
        device: BlockAllocator,
        host: BlockAllocator,
        block_tokens: int,
        *,
        watermark: float = 0.01,
        window: int = 0,
        name: NameBlocks = chain_hashes,
    ) -> None:
        """
        Args:
            name: makes the chained hashes of full blocks.
            watermark: share of the device's blocks that stay free when a sequence is admitted, so that those that run
            can grow for a while before one has to go.
            window: tokens of the model's sliding window, with the token itself. Blocks behind it are released. 0: none.
        """
        if block_tokens < 1 or not 0 <= watermark < 1 or window < 0:
            raise InvalidRequest("block_tokens must be at least 1, watermark in [0, 1) and window at least 0")
        self.device, self.host = device, host
        self.block_tokens, self.window = block_tokens, window
        self._name = name
        self.watermark_blocks = int(watermark * device.count)

    def blocks_for(self, tokens: int) -> int:
        return div_ceil(tokens, self.block_tokens)

    def hashes(self, sequence: PagedSequence) -> list[BlockHash]:
        """The chained hashes of its full blocks, the newest tokens included."""
        known = sequence.hashes
        behind = sequence.tokens[len(known) * self.block_tokens :]
        if len(behind) >= self.block_tokens:
            known += self._name(behind, self.block_tokens, sequence.root, known[-1] if known else None)
        return known

    # -- is there room? ----

    def can_allocate(self, count: int, *, total: int = 0) -> Room:
        """Whether `count` free blocks may be given to a sequence that holds `total` of them then, if that is more."""
        if self.device.count - max(count, total) < self.watermark_blocks:
            return Room.NEVER
        return Room.OK if self.device.free_count - count >= self.watermark_blocks else Room.LATER

    def required(self, sequences: Sequence[PagedSequence]) -> int:
        """The blocks that hold all tokens of these sequences when equal prefixes are shared."""
        shared = {block_hash for sequence in sequences for block_hash in self._shareable(sequence)}
        alone = (self.blocks_for(len(one.tokens)) - len(self._shareable(one)) for one in sequences)
        return len(shared) + sum(alone)

    def _shareable(self, sequence: PagedSequence) -> list[BlockHash]:
        """The names of the full blocks that others may have filled. At least the last token is left to compute."""
        return self.hashes(sequence)[: (len(sequence.tokens) - 1) // self.block_tokens]

    def room_for(self, sequences: Sequence[PagedSequence]) -> Room:
        """Whether the sequences of a group, which hold no blocks, may be admitted."""
        required = self.required(sequences)
        in_use = sum(self.device.refs(block_id) > 0 for block_id in self.match(sequences[0]))
        return self.can_allocate(required - in_use, total=required)

    def appends(self, ends: Sequence[tuple[PagedSequence, int]]) -> int:
        """How many free blocks it takes to write each of a group's sequences up to its end: copies and new blocks."""
        touched = Counter(
            sequence.table[position] for sequence, end in ends for position in self._touched(sequence, end)
        )
        # If nobody else counts on a block, the last of those that write it needs no copy.
        allocator = self.host if ends and ends[0][0].on_host else self.device
        copies = sum(count - (allocator.refs(block_id) == count) for block_id, count in touched.items())
        return copies + sum(max(0, self.blocks_for(end) - len(sequence.table)) for sequence, end in ends)

    def can_append(self, ends: Sequence[tuple[PagedSequence, int]]) -> bool:
        return self.appends(ends) <= self.device.free_count

    def _touched(self, sequence: PagedSequence, end: int) -> range:
        """Positions in the table of the blocks that [computed, end) writes and that are there."""
        return range(sequence.computed // self.block_tokens, min(self.blocks_for(end), len(sequence.table)))

    def can_swap_out(self, sequences: Sequence[PagedSequence]) -> bool:
        return len(self.blocks_of(sequences)) <= self.host.free_count

    def can_swap_in(self, sequences: Sequence[PagedSequence]) -> Room:
        """With room for the tokens that are not computed yet, so that what comes in can run."""
        growth = self.appends([(sequence, len(sequence.tokens)) for sequence in sequences])
        return self.can_allocate(len(self.blocks_of(sequences)) + growth)

    def blocks_of(self, sequences: Iterable[PagedSequence]) -> set[int]:
        """The blocks of these sequences that hold something."""
        filled = (one.table[: self.blocks_for(one.computed)] for one in sequences)
        return {block_id for table in filled for block_id in table if block_id != RELEASED}

    # -- growing ----

    def match(self, sequence: PagedSequence) -> list[int]:
        """The full blocks that hold its first tokens already."""
        found: list[int] = []
        for block_hash in self._shareable(sequence):
            block_id = self.device.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def share_prefix(self, sequence: PagedSequence, *, tail: bool = True) -> int:
        """Give an empty table the blocks that hold its first tokens already. Returns how many tokens that is.

        With `tail` also the beginning of a block, as far as a step or a sequence ended in it. Who writes behind it
        copies the block first, if others count on it.
        """
        assert not sequence.table, "it has blocks"
        sequence.table = [self.device.share(block_id) for block_id in self.match(sequence)]
        sequence.named = len(sequence.table)
        begin = sequence.computed = len(sequence.table) * self.block_tokens
        longest = min(self.block_tokens, len(sequence.tokens) - begin) - 1
        for end in range(begin + longest, begin, -1) if tail else ():
            block_id = self.device.find(self._tail_name(sequence, end))
            if block_id is not None:
                sequence.table.append(self.device.share(block_id))
                sequence.computed = end
                break
        return sequence.computed

    def tail_hash(self, sequence: PagedSequence, begin: int, end: int) -> BlockHash | None:
        """The hash of a short block of the tokens [begin, end), `begin` being where a block begins. None if the
        sequence has no such token yet."""
        before = begin // self.block_tokens
        if end > len(sequence.tokens) or len(self.hashes(sequence)) < before:
            return None
        tail = sequence.tokens[begin:end]
        return chain_hashes(tail, end - begin, sequence.root, sequence.hashes[before - 1] if before else None)[0]

    def _tail_name(self, sequence: PagedSequence, end: int) -> BlockHash:
        """The name of a block whose last token is the one before `end`."""
        name = self.tail_hash(sequence, end // self.block_tokens * self.block_tokens, end)
        assert name is not None, "its tokens are known"
        return name

    def append(self, sequence: PagedSequence, end: int) -> Pairs:
        """Make the tokens [computed, end) writable: new blocks, and copies of those that others share.

        Returns the copies to make on the device before anything is written. Raises Exhausted, without effect, if there
        are not enough free blocks.
        """
        assert not sequence.on_host, "its blocks are on the host"
        if not self.can_append([(sequence, end)]):
            raise Exhausted(f"no {self.appends([(sequence, end)])} free blocks on {self.device.device}")
        pairs: Pairs = []
        for position in self._touched(sequence, end):
            source = sequence.table[position]
            if self.device.refs(source) > 1:
                sequence.table[position] = self.device.allocate()
                self.device.free(source)
                pairs.append((source, sequence.table[position]))
            else:
                self.device.unname(source)
        while len(sequence.table) < self.blocks_for(end):
            sequence.table.append(self.device.allocate())
        return pairs

    def written(self, sequence: PagedSequence, end: int) -> None:
        """Note that the K/V of the tokens up to `end` is in the blocks. They can be found from now on."""
        sequence.computed = end
        hashes = self.hashes(sequence)
        full = end // self.block_tokens
        for position in range(sequence.named, full):
            if sequence.table[position] != RELEASED:
                self.device.name(sequence.table[position], hashes[position])
        sequence.named = full
        if end % self.block_tokens:
            self.device.name(sequence.table[full], self._tail_name(sequence, end))
        if self.window:
            self._release(sequence, (end - self.window + 1) // self.block_tokens)

    def _release(self, sequence: PagedSequence, count: int) -> None:
        """Free the first `count` blocks of the table. The next token, at `computed`, reads none of them."""
        for position in range(max(count, 0)):
            if sequence.table[position] != RELEASED:
                self.device.free(sequence.table[position])
                sequence.table[position] = RELEASED

    def first_token(self, sequence: PagedSequence) -> int:
        """The first token whose block was not released."""
        return self.block_tokens * sum(block_id == RELEASED for block_id in sequence.table)

    # -- forks ----

    def fork(self, sequence: PagedSequence, sequence_id: int) -> PagedSequence:
        """A second sequence with the same tokens, which counts on the same blocks. Nothing is copied yet."""
        for block_id in sequence.held:
            (self.host if sequence.on_host else self.device).share(block_id)
        tokens, table, hashes = list(sequence.tokens), list(sequence.table), list(sequence.hashes)
        return replace(sequence, sequence_id=sequence_id, tokens=tokens, table=table, hashes=hashes)

    def free(self, sequence: PagedSequence) -> None:
        """Take all blocks from it, the last first: a prefix is of use to more sequences than what follows it."""
        allocator = self.host if sequence.on_host else self.device
        for block_id in reversed(sequence.held):
            allocator.free(block_id)
        sequence.table, sequence.computed, sequence.named, sequence.on_host = [], 0, 0, False

    # -- swapping ----

    def swap_out(self, sequences: Sequence[PagedSequence]) -> Pairs:
        """Move sequences that share blocks to the host, as one. Returns (device id, host id) of each block to copy.

        Blocks that hold nothing yet are freed. Other sequences keep the blocks that they share. Raises Exhausted,
        without effect, if the host has too few free blocks.
        """
        return self._move(sequences, self.device, self.host)

    def swap_in(self, sequences: Sequence[PagedSequence]) -> Pairs:
        """The way back: (host id, device id) of each block to copy. The ids on the device are others than before."""
        pairs = self._move(sequences, self.host, self.device)
        for sequence in sequences:
            sequence.named = 0  # `written` names the copies when they are there
        return pairs

    def _move(self, sequences: Sequence[PagedSequence], source: BlockAllocator, target: BlockAllocator) -> Pairs:
        count = len(self.blocks_of(sequences))
        if count > target.free_count:
            raise Exhausted(f"{count} blocks do not fit into {target.free_count} free ones on {target.device}")
        moved: dict[int, int] = {}
        for sequence in sequences:
            assert sequence.on_host == (source is self.host), "it is on the other device"
            filled = self.blocks_for(sequence.computed)
            for block_id in sequence.table[filled:]:
                source.free(block_id)
            del sequence.table[filled:]
            for position, block_id in enumerate(sequence.table):
                if block_id == RELEASED:
                    continue
                if block_id in moved:
                    target.share(moved[block_id])
                else:
                    moved[block_id] = target.allocate()
                sequence.table[position] = moved[block_id]
                source.free(block_id)
            sequence.on_host = target is self.host
        return list(moved.items())

    # -- inside ----

    def check_invariants(self, sequences: Iterable[PagedSequence], pins: Counter[int] | None = None) -> None:
        """`sequences`: all that have blocks. `pins`: references to the device's blocks beside theirs."""
        counted = {self.device: Counter(pins or {}), self.host: Counter[int]()}
        for sequence in sequences:
            assert sequence.computed <= len(sequence.tokens)
            assert self.blocks_for(sequence.computed) <= len(sequence.table)
            counted[self.host if sequence.on_host else self.device].update(sequence.held)
        for allocator, counts in counted.items():
            allocator.check_invariants()
            assert allocator.in_use() == counts, f"{allocator.device}: references are lost or left over"
