"""Announcers and a directory over a network that loses, repeats, delays and reorders, while both sides restart.

Whatever happened, once messages get through the directory knows exactly what the shards hold. And at no moment does a
directory that has confirmed everything of a node differ from it, whichever old messages still arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvservice.core.actions import Announce, Retract
from kvservice.core.block.keys import unpack_keys
from kvservice.core.directory import announce
from kvservice.core.directory.announce import Announcer, Update
from kvservice.core.directory.directory import AnnounceOutcome, Directory
from kvservice.core.messages import Holder
from kvservice.units import BlockKey, BootEpoch, NodeId, SpanRoute
from tests.settled import is_synced

ROUTE = SpanRoute(0)
KEYS = [BlockKey(bytes([number]) * 16) for number in range(12)]
NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)
HIDE, FORGET = 3.0, 10.0


@dataclass
class Boot:
    """One boot of one shard."""

    node: Holder
    held: set[BlockKey]
    announcer: Announcer = field(init=False)
    attempt: int = 0  # only the answer to the latest attempt is listened to

    def __post_init__(self) -> None:
        self.announcer = Announcer(1, lambda: [(key, ROUTE) for key in sorted(self.held)])


@dataclass
class Message:
    boot: Boot
    update: Update
    attempt: int


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(announce, "UPDATE_KEYS_MAX", 3)
        self.patch.start()
        self.now = 0.0
        self.lookup_epoch = 1
        self.directory = Directory(HIDE, FORGET)
        self.boots: dict[str, Boot] = {}
        self.network: list[Message] = []
        self.sent: list[Message] = []  # everything ever sent, for replays

    @initialize()
    def boot_all(self) -> None:
        for name in NAMES:
            self.boots[name] = Boot(Holder(NodeId(name), f"{name}:1", BootEpoch(1)), set())

    # -- the shards ----

    @rule(name=names, key=st.sampled_from(KEYS))
    def store_or_evict(self, name: str, key: BlockKey) -> None:
        boot = self.boots[name]
        if key in boot.held:
            boot.held.discard(key)
            boot.announcer.change([Retract(key, ROUTE)])
        else:
            boot.held.add(key)
            boot.announcer.change([Announce(key, ROUTE)])

    @rule(name=names, kept=st.integers(0, len(KEYS)))
    def restart_shard(self, name: str, kept: int) -> None:
        old = self.boots[name]
        node = Holder(old.node.node_id, old.node.peer_address, BootEpoch(old.node.epoch + 1))
        self.boots[name] = Boot(node, set(sorted(old.held)[:kept]))

    @rule(name=names)
    def forget_own_sequences(self, name: str) -> None:
        """A second announcer in one boot: its sequences start again at 1."""
        old = self.boots[name]
        self.boots[name] = Boot(old.node, old.held)
        self.network = [message for message in self.network if message.boot is not old]
        self.sent = [message for message in self.sent if message.boot is not old]

    @rule(name=names)
    def leave(self, name: str) -> None:
        boot = self.boots[name]
        boot.attempt += 1
        if boot.announcer._streams[0].in_flight:
            boot.announcer.on_failure(0)
        if not boot.announcer.fenced:
            self._post(Message(boot, boot.announcer.farewell(0), attempt=-1))

    def _post(self, message: Message) -> None:
        self.network.append(message)
        self.sent.append(message)

    # -- the network ----

    @rule(name=names, heartbeat=st.booleans())
    def send(self, name: str, heartbeat: bool) -> None:
        boot = self.boots[name]
        if boot.announcer.fenced or boot.announcer._streams[0].in_flight:
            return
        update = boot.announcer.heartbeat(0) if heartbeat else boot.announcer.next_update(0)
        if update is not None:
            boot.attempt += 1
            self._post(Message(boot, update, boot.attempt))

    @precondition(lambda self: self.network)
    @rule(data=st.data(), repeat=st.booleans(), answer_lost=st.booleans())
    def deliver(self, data: st.DataObject, repeat: bool, answer_lost: bool) -> None:
        position = data.draw(st.integers(0, len(self.network) - 1))
        message = self.network[position] if repeat else self.network.pop(position)
        outcome = self._apply(message)
        boot = message.boot
        if boot.announcer._streams[0].in_flight and message.attempt == boot.attempt and not answer_lost:
            boot.announcer.on_reply(0, outcome, self.lookup_epoch)

    @rule(name=names)
    def talk_undisturbed(self, name: str) -> None:
        boot = self.boots[name]
        while not (boot.announcer.fenced or is_synced(boot.announcer, 0)):
            if boot.announcer._streams[0].in_flight:
                boot.announcer.on_failure(0)
            boot.attempt += 1
            update = boot.announcer.next_update(0)
            assert update is not None
            self.sent.append(Message(boot, update, boot.attempt))
            boot.announcer.on_reply(0, self._apply(self.sent[-1]), self.lookup_epoch)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        """Something long since sent arrives once more; nobody listens to the answer."""
        self._apply(self.sent[data.draw(st.integers(0, len(self.sent) - 1))])

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.network.pop(data.draw(st.integers(0, len(self.network) - 1)))

    @rule(name=names)
    def time_out(self, name: str) -> None:
        boot = self.boots[name]
        if boot.announcer._streams[0].in_flight:
            boot.attempt += 1
            boot.announcer.on_failure(0)

    # -- the lookup partition ----

    @rule()
    def restart_lookup(self) -> None:
        self.lookup_epoch += 1
        self.directory = Directory(HIDE, FORGET)

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.directory.expire(self.now)

    @rule(limit=st.integers(1, 5))
    def sweep(self, limit: int) -> None:
        self.directory.sweep(limit)

    def _apply(self, message: Message) -> AnnounceOutcome:
        update = message.update
        return self.directory.apply(
            message.boot.node,
            update.sequence,
            update.added,
            update.removed,
            full_begin=update.full_begin,
            full_end=update.full_end,
            leaving=update.leaving,
            now=self.now,
        )

    # -- what must hold ----

    @invariant()
    def both_are_sound(self) -> None:
        self.directory.check_invariants()
        for boot in self.boots.values():
            boot.announcer.check_invariants()

    @invariant()
    def confirmed_directory_is_exact(self) -> None:
        known, more = self.directory.snapshot(0, 1 << 20)
        assert more is None
        for name, boot in self.boots.items():
            confirmed = boot.announcer._streams[0].lookup_epoch == self.lookup_epoch
            member = self.directory._membership.get(boot.node.node_id)
            if confirmed and is_synced(boot.announcer, 0) and member in self.directory._membership.members():
                held = set(unpack_keys(known.get(boot.node.node_id, b"")))
                assert held == boot.held, f"{name}: the directory is wrong and sure"

    @invariant()
    def only_the_newest_epoch_heard_of_is_given(self) -> None:
        for run in self.directory.resolve(KEYS, self.now):
            for holder in run.holders:
                assert holder.epoch == self.directory._membership._members[holder.node_id].holder.epoch

    def teardown(self) -> None:
        try:
            self._heal()
        finally:
            self.patch.stop()

    def _heal(self) -> None:
        """Nothing is lost any more, and nothing old is left in the network."""
        self.network.clear()
        for boot in self.boots.values():
            self._converge(boot)
        holders = {key: set() for key in KEYS}
        for run in self.directory.resolve(KEYS, self.now):
            for key in KEYS[run.start : run.start + run.count]:
                holders[key] = {str(holder.node_id) for holder in run.holders}
        assert holders == {key: {name for name in self.boots if key in self.boots[name].held} for key in KEYS}
        while self.directory.sweep(5):
            self.directory.check_invariants()

    def _converge(self, boot: Boot) -> None:
        announcer = boot.announcer
        assert not announcer.fenced, "the newest boot was told that it is old"
        if announcer._streams[0].in_flight:
            announcer.on_failure(0)
        exchanged = 0
        beats = 0
        while beats < 2:  # the first heartbeat may be refused and start a full announcement
            beats = beats + 1 if is_synced(announcer, 0) else 0
            announcer.on_reply(0, self._apply(Message(boot, announcer.heartbeat(0), 0)), self.lookup_epoch)
            exchanged += 1
            assert exchanged < 60, "announcer and directory do not come to rest"


DirectoryMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow]
)
TestDirectory = DirectoryMachine.TestCase
