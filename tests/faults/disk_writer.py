"""`python -m tests.faults.disk_writer FOLDER`: write blocks into a disk tier until the process is killed.

It prints a line for each round of blocks that was answered."""

from __future__ import annotations

import random
import sys
from functools import partial
from itertools import count
from pathlib import Path

from kvservice.testing.eventually import eventually
from kvservice.testing.tier_contract import StartedTier, a_block
from kvservice.tier.block_files import name_of
from kvservice.tier.disk import DiskTier

BLOCKS, BYTES = 8, 64 << 10


def payload_of(number: int, round_: int) -> bytes:
    """The bytes of block `number` in this round, which they begin with."""
    return round_.to_bytes(4, "big") + random.Random(f"{number} {round_}").randbytes(BYTES - 4)


def is_gone(file: Path) -> bool:
    return not file.exists()


def main() -> None:
    folder = Path(sys.argv[1])
    tier = StartedTier(DiskTier(folder))
    for round_ in count():
        written = [payload_of(number, round_) for number in range(BLOCKS)]
        tier.write(*((a_block(number, written[number]), written[number]) for number in range(BLOCKS)))
        key = a_block(round_ % BLOCKS, b"x").key
        file = folder / name_of(key)
        tier.tier.erase([key])
        print(round_, flush=True)
        # Erasing is not answered, and a thread that is slow to do it could take the block of a later round.
        eventually(partial(is_gone, file), "a block that is erased")


if __name__ == "__main__":
    main()
