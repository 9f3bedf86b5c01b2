"""An engine in a process of its own that takes, seals and gives back slots and opens and closes hand-offs, as fast as
it can, until it gets SIGUSR1. Then it does nothing more, and answers each line of its input with what it holds."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time

import kvservice.client.shard
from kvservice.client.shard import ShardClient
from kvservice.core.messages import SealItem
from kvservice.pool.port import PoolPort
from kvservice.session.session import Session
from kvservice.units import AttachmentId, BlockKey, HandoffId, SpanRoute
from tests.integration.engine import spec

CALL_SECONDS = 0.5


def main(socket: str) -> None:
    kvservice.client.shard.CALL_SECONDS = CALL_SECONDS

    async def open_pool() -> PoolPort:
        return ShardClient(socket)

    session = Session(open_pool, spec(), lambda: True)
    is_over = False

    def end(number: int, frame: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGUSR1, end)
    session.start(30.0)
    print("ready", flush=True)
    chance = random.Random(7)
    open_handoffs: list[tuple[AttachmentId, HandoffId]] = []
    for number in itertools.count():
        if is_over:
            break
        _step(session, chance, number, open_handoffs)
        time.sleep(0.002)
    for handoff in open_handoffs:
        session.close_handoff(*handoff)
    for _ in sys.stdin:
        print(len(session._ledger.slots), flush=True)


def _step(
    session: Session, chance: random.Random, number: int, open_handoffs: list[tuple[AttachmentId, HandoffId]]
) -> None:
    attachment = session.attachment
    if attachment is None:
        return
    identity = attachment.attachment_id
    refs = session.take_slots(identity, chance.randrange(1, 9))
    sealed = chance.randrange(len(refs) + 1)
    key = BlockKey(os.urandom(16))
    session.seal(identity, [SealItem(ref, key, None, 0, SpanRoute(0)) for ref in refs[:sealed]])  # all but one: known
    session.abort(identity, refs[sealed:])
    session.expect(chance.choice((-40, -9, 9, 40)))
    if number % 8 == 0:
        handoff = HandoffId(os.urandom(16))
        if session.open_handoff(handoff) == identity:
            open_handoffs.append((identity, handoff))
    while len(open_handoffs) > 3:
        session.close_handoff(*open_handoffs.pop(0))


if __name__ == "__main__":
    main(sys.argv[1])
