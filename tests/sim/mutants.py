"""Bugs that the simulator must find, each named after the rule it breaks, with a schedule that finds it.

`seed` is where the search found it first; when the code or the simulator changes, the test searches again.
"""

from __future__ import annotations

from tests.sim.mutation import Mutant

FETCH = "kvservice.core.acquire.acquisitions"
PULLS = "kvservice.core.acquire.pulls"
SHARD = "kvservice.core.shard"
ATTACHMENTS = "kvservice.core.attachments"
WRITES = "kvservice.core.writes"
BLOCKS = "kvservice.core.store.blocks"
LEASES = "kvservice.core.store.leases"
KEYS = "kvservice.core.block.keys"
TENANTS = "kvservice.core.block.tenants"
DIGEST = "kvservice.core.segment.digest"
MEMBERSHIP = "kvservice.core.directory.membership"
DIRECTORY = "kvservice.core.directory.directory"
ANNOUNCE = "kvservice.core.directory.announce"
SCHEDULER = "kvservice.connector.scheduler.half"
SESSION = "kvservice.session.session"
RECONCILE = "kvservice.core.reconcile"
MEETINGS = "kvservice.core.directory.meetings"
MEETING = "kvservice.pool.meeting"
HANDOFF = "kvservice.core.acquire.handoff"
RUNTIME = "kvservice.pool.runtime"
VANISHED = "kvservice.pool.vanished"
STORE_PLAN = "kvservice.connector.scheduler.store_plan"
STORES = "kvservice.connector.scheduler.stores"
LOADS = "kvservice.connector.scheduler.loads"
TIERS = "kvservice.core.tier.tiers"
BOOKS = "kvservice.core.tier.books"
POOL_TIERS = "kvservice.pool.tiers"
CODER = "kvservice.codec.coder"
BLOCKFILE = "kvservice.core.segment.blockfile"
CONTEXT = "kvservice.core.context"
FRESHNESS = "kvservice.core.store.freshness"

AIO = "kvservice.aio"
ANNOUNCER = "kvservice.lookup.announce_pump"
SLABS = "kvservice.memory.slabs"

MUTANTS = (
    Mutant(
        "a cancellation that meets a result is not lost",
        AIO,
        "        await end_tasks([task])\n        raise\n",
        "        if not task.done():\n            await end_tasks([task])\n            raise\n",
        also=(
            (
                ANNOUNCER,
                "        await end_tasks(tasks)\n",
                "        for task in tasks:\n            task.cancel()\n"
                "        await asyncio.gather(*tasks, return_exceptions=True)\n",
            ),
        ),
        seed=118,
    ),
    Mutant("a digest is bound to its key", DIGEST, 'int.from_bytes(key[8:16], "big")', "0", seed=937),
    Mutant(
        "the fingerprint is in the key",
        KEYS,
        "    base = _hasher(fingerprint_digest, tenant_key)\n    keys",
        "    base = _hasher(b'', tenant_key)\n    keys",
        seed=9,
    ),
    Mutant(
        "the tenant is in the key",
        KEYS,
        "    base = _hasher(fingerprint_digest, tenant_key)\n    keys",
        "    base = _hasher(fingerprint_digest, b'')\n    keys",
        seed=13,
    ),
    Mutant(
        "nobody's blocks go below its quota for another tenant",
        TENANTS,
        "        return lambda other: other == account or self.can_spare(other, payload_bytes)",
        "        return None",
        seed=20,
    ),
    Mutant(
        "a tenant at its quota gives its own blocks",
        BLOCKS,
        "            victim = self._victim(None, lambda other: other == want.account)\n",
        "            return True\n",
        seed=6,
    ),
    Mutant(
        "a transfer that did not end keeps its slot",
        PULLS,
        "            self._shard.store.quarantine(slot)\n            pull.stuck",
        "            self._shard.store.abort(slot)\n            return\n            pull.stuck",
        seed=434,
    ),
    Mutant(
        "a stuck slot is given back when its transfer has ended",
        PULLS,
        "for slot in pull.stuck:",
        "for slot in []:",
        seed=24,
    ),
    Mutant(
        "what a pull brought is verified",
        PULLS,
        "            if result is PullResult.OK:\n",
        "            if result is not PullResult.STUCK:\n",
        seed=214,
    ),
    Mutant(
        "a gap ends the prefix",
        FETCH,
        "        acquisition.grow_run()\n        end = min(acquisition.run_end, acquisition.break_at)\n",
        "        acquisition.run += [acquisition.held.pop(i) for i in sorted(acquisition.held)]\n"
        "        end = acquisition.run_end\n",
        seed=1,
    ),
    Mutant(
        "what an acquisition held beyond its promise is let go",
        FETCH,
        "        self._store.unpin((*beyond, *acquisition.held.values()))\n",
        "        self._store.unpin(beyond)\n",
        seed=1,
    ),
    Mutant(
        "a cancelled call lets its blocks go",
        FETCH,
        "        self._store.unpin((*acquisition.run, *acquisition.held.values()))\n",
        "",
        seed=31,
    ),
    Mutant(
        "slots of an engine that vanished rest until its last process is gone",
        WRITES,
        "                self._store.quarantine(slot)\n",
        "                self._store.abort(slot)\n",
        seed=193,
    ),
    Mutant(
        "slots of an engine that is gone come back",
        ATTACHMENTS,
        "            self._writes.free(event.engine_id)",
        "            pass",
        seed=0,
    ),
    Mutant(
        "a reserve ends with its attachment",
        WRITES,
        "            self.cancel(op)\n            self._emit(Refuse(",
        "            (lambda *_: None)(Refuse(",
        seed=143,
    ),
    Mutant(
        "a seal is answered after its last slice",
        WRITES,
        "                yield\n            batch.statuses[position] =",
        "                batch.open_count -= 1\n                self._answer_batch(batch)\n"
        "                yield\n                batch.open_count += 1\n            batch.statuses[position] =",
        seed=7,
    ),
    Mutant(
        "a turn that comes too late does nothing",
        FETCH,
        "            del self._open[acquisition.op]\n            self._shard.slices.drop(acquisition.op)\n",
        "            del self._open[acquisition.op]\n",
        seed=47,
    ),
    Mutant(
        "a lease ends once",
        LEASES,
        '        self._drop(lease)\n        self.counters["leases_released"] += 1',
        '        self.counters["leases_released"] += 1',
        seed=1,
    ),
    Mutant(
        "a lease ends when its time is over",
        LEASES,
        "now + duration)\n        self._next_id",
        "now + 1000 * duration)\n        self._next_id",
        seed=24,
    ),
    Mutant(
        "an evicted block is taken out of the directory",
        BLOCKS,
        "        self._change(Retract(key, block.route))\n",
        "",
        seed=1,
    ),
    Mutant(
        "a sealed block is announced",
        BLOCKS,
        '        self._change(Announce(key, route))\n        self.counters["blocks_sealed"] += 1',
        '        self.counters["blocks_sealed"] += 1',
        seed=0,
    ),
    Mutant(
        "a gap in the announcements asks for all of them",
        MEMBERSHIP,
        "if not full_begin and sequence != member.last_sequence + 1:",
        "if False:",
        also=(
            (
                ANNOUNCE,
                '        self._streams[partition].in_flight = False\n        self.counters["announce_failed"] += 1',
                "        self._streams[partition].in_flight = False\n"
                "        self._streams[partition].outstanding = None\n"
                '        self.counters["announce_failed"] += 1',
            ),
        ),
        seed=67,
    ),
    Mutant(
        "removals wait until the full announcement is out",
        DIRECTORY,
        "            self._remove(node.node_id, bit, less)",
        "            self._remove(node.node_id, bit, less[16:])",
        seed=1,
    ),
    Mutant(
        "a node's old blocks are forgotten when it announces itself anew",
        DIRECTORY,
        "        if effect.forget:\n            self._retire(",
        "        if effect.forget and leaving:\n            self._retire(",
        seed=11,
    ),
    Mutant(
        "what is stored is stored under its own key",
        STORE_PLAN,
        "        planned.items.append(_seal_item(ref, keys, group, position, request.terms.hints))\n"
        "        planned.entries += entries_of(places, ref, keys[position])\n",
        "        planned.items.append(_seal_item(ref, keys, group, position - 1, request.terms.hints))\n"
        "        planned.entries += entries_of(places, ref, keys[position - 1])\n",
        seed=0,
    ),
    Mutant(
        "a block is sealed after it was copied",
        STORES,
        "        return StorePlan(self._last_id, tuple(planned.entries))",
        "        self._session.seal(attachment, planned.items)\n"
        "        return StorePlan(self._last_id, tuple(planned.entries))",
        seed=0,
    ),
    Mutant(
        "a block that is being copied is pinned",
        STORES,
        "            self._pins.pin(read)",
        "            self._pins.pin([])",
        seed=0,
    ),
    Mutant(
        "a load's lease ends with it",
        LOADS,
        "                self._session.release(attachment, lease_id)",
        "                pass",
        seed=1,
    ),
    Mutant(
        "a reset changes the names",
        "kvservice.connector.scheduler.request_keys",
        "        self._term = term\n        attachment",
        "        attachment",
        seed=9,
    ),
    Mutant(
        "what was promised before a reset is forgotten",
        SCHEDULER,
        "            self._forget_promise(request)\n",
        "            pass\n",
        seed=59,
    ),
    Mutant(
        "a promise that is not taken up is given back",
        SCHEDULER,
        "            if request.state is RequestState.ANSWERED:\n                self._end_lease",
        "            if False:\n                self._end_lease",
        seed=1040,
    ),
    Mutant(
        "an answer that comes too late is given back",
        SCHEDULER,
        "            self._end_lease(answer.attachment, result.lease_id)  # too late",
        "            #",
        seed=140,
    ),
    Mutant(
        "nothing is promised beyond what is leased",
        SCHEDULER,
        "min(request.promised_end, total_tokens // self._block_tokens))\n",
        "min(request.promised_end, total_tokens // self._block_tokens)) + bool(request.result.blocks)\n",
        seed=3,
    ),
    Mutant(
        "an engine attaches again only when its workers write no more",
        SCHEDULER,
        "        return self._stores.is_quiet",
        "        return True",
        seed=7,
    ),
    Mutant(
        "a block that is leased is not evicted",
        BLOCKS,
        " is not None and self._slots[key].pins:\n            self._hold_back([key])",
        " is not None and self._slots[key].pins == 9:\n            self._hold_back([key])",
        seed=1,
    ),
    Mutant("a slot whose abort was lost comes back", RECONCILE, "                found.append(ref)\n", "", seed=24),
    Mutant(
        "a lease whose release was lost ends",
        LEASES,
        "for lease_id in self._by_holder.get(holder, set()).intersection(lease_ids):",
        "for lease_id in set(self._by_holder.get(holder, ())):",
        seed=24,
    ),
    Mutant(
        "a hand-off whose close was lost is closed",
        HANDOFF,
        "                self._close(handoff, known, now)\n\n    def _enter",
        "\n    def _enter",
        seed=654,
    ),
    Mutant(
        "slots of an answer that came too late come back",
        RECONCILE,
        "        self._open.discard(call)\n",
        "",
        seed=72,
    ),
    Mutant(
        "a close that overtakes its open wins",
        HANDOFF,
        '            self._counters["handoff_close_ignored"] += 1\n            return\n',
        '            self._counters["handoff_close_ignored"] += 1\n            return\n'
        "        if not known.is_heard:\n            del self._handoffs[handoff]\n            return\n",
        also=((SHARD, "            self._handoffs.reconcile(event.statement, event.attachment, now)\n", ""),),
        seed=246,
    ),
    Mutant(
        "a slot that a worker writes is stated",
        SESSION,
        "            taken = self._stock.take(count, group)\n",
        "            taken = self._stock.take(count, group)\n            self._ledger.give_back(taken)\n",
        seed=11,
    ),
    Mutant(
        "a restarted shard asks who may still write",
        RUNTIME,
        "        for engine_id in self._state.watch_list():\n            self._vanished.watch(engine_id)\n",
        "        for engine_id in self._state.watch_list():\n            self._dispatch(ev.EngineGone(engine_id))\n",
        seed=196,
    ),
    Mutant(
        "a detach says nothing about who still writes",
        ATTACHMENTS,
        "            self._writes.quarantine(attached.spec.engine_id)\n\n    def _attachment_lost",
        "            self._writes.free(attached.spec.engine_id)\n\n    def _attachment_lost",
        seed=52,
    ),
    Mutant(
        "an attach that was overtaken is refused",
        ATTACHMENTS,
        "        if 0 < spec.attempt <= (self._attempts.get(spec.engine_id) or 0):",
        "        if False:",
        seed=215,
    ),
    Mutant(
        "the shard looks and acts under one lock",
        VANISHED,
        "            if is_free:\n                self._dispatch(ev.EngineGone(engine_id))\n",
        "            if is_free:\n"
        "                loop = asyncio.get_running_loop()\n"
        "                loop.call_later(0.5, self._dispatch, ev.EngineGone(engine_id))\n",
        seed=354,
    ),
    Mutant(
        "tier: a block is pinned while it is written down",
        TIERS,
        "        self._store.pin((block.slot,))\n        return written, block.slot.index",
        "        return written, block.slot.index",
        seed=2,
    ),
    Mutant(
        "tier: the pins of a write end with its answer",
        TIERS,
        "                self._store.unpin((self._store.table[slot],))\n",
        "",
        seed=2,
    ),
    Mutant(
        "tier: what the disk has stays announced",
        TIERS,
        "        return bool(self._own) and self.holds(key)",
        "        return False",
        seed=8,
    ),
    Mutant(
        "tier: what left memory and disk is retracted",
        TIERS,
        "            if block.key not in self._store and not self.holds(block.key):\n",
        "            if False:\n",
        seed=5,
    ),
    Mutant(
        "tier: found blocks are announced",
        TIERS,
        "            if is_new:\n",
        "            if False:\n",
        seed=89,
    ),
    Mutant(
        "tier: what is evicted from the disk is erased",
        TIERS,
        "            self._shard.emit(Erase(rules.name, (block.key,)))\n",
        "",
        seed=5,
    ),
    Mutant(
        "tier: nothing is erased that the books name",
        TIERS,
        "                chain.append(key)\n",
        "                self._shard.emit(Erase('disk', (key,)))\n",
        seed=8,
    ),
    Mutant(
        "tier: the books are told what was not written",
        POOL_TIERS,
        "tuple(result is WriteResult.OK for result in results)",
        "tuple(True for result in results)",
        seed=107,
    ),
    Mutant(
        "tier: the disk keeps its budget",
        BOOKS,
        "        while self.used_bytes + entry.file_bytes > self.limit_bytes:\n",
        "        while False:\n",
        seed=5,
    ),
    Mutant(
        "tier: the books count what a block takes when it is written",
        BOOKS,
        "disk_room(stored_bytes or entry.block.payload_bytes)",
        "disk_room(entry.block.payload_bytes)",
        seed=5,
    ),
    Mutant(
        "tier: a start counts what blocks take on the disk",
        BOOKS,
        "disk_room(block.stored_bytes or block.payload_bytes)",
        "disk_room(block.payload_bytes)",
        seed=89,
    ),
    Mutant(
        "tier: what is being read is not evicted from the disk",
        TIERS,
        "                tier.books.pin(block.key)\n",
        "                pass\n",
        seed=26,
    ),
    Mutant(
        "tier: a read is answered when nothing writes the slot any more",
        POOL_TIERS,
        "        tier.read(TierRead(action.job, items, action.deadline, action.urgent), came)\n",
        "        tier.read(TierRead(action.job, items, action.deadline, action.urgent), came)\n"
        "        self._report(ev.BroughtBack(action.job, _none_of(action)), None)\n",
        seed=11,
    ),
    Mutant(
        "tier: a file's bytes are held against its digest",
        CODER,
        "            if copy_and_digest(target, memoryview(data), header.block.key) != header.block.digest:\n",
        "            target[:] = data\n            if False:\n",
        seed=3185,
    ),
    Mutant(
        "tier: a file of another block is no hit",
        BLOCKFILE,
        "    same = (block.key, block.payload_bytes) == (wanted.key, wanted.payload_bytes)\n",
        "    same = block.payload_bytes == wanted.payload_bytes\n",
        seed=2009,
    ),
    Mutant(
        "tier: a file of another engine is no hit",
        BLOCKFILE,
        "    return same and (not wanted.fingerprint or",
        "    return same and (True or",
        seed=1748,
    ),
    Mutant(
        "tier: a read takes its share of the memory only",
        TIERS,
        "            if not fits_share(known.payload_bytes, held_bytes, self._reading_max):\n                break\n",
        "",
        seed=341,
    ),
    Mutant(
        "age: what a tier gives is as old as its file",
        PULLS,
        "digest=block.digest or handle.digest, stored_at=block.stored_at))\n",
        "digest=block.digest or handle.digest))\n",
        seed=26,
    ),
    Mutant(
        "age: what has reached the limit is no hit",
        FRESHNESS,
        "        if self.max_age_seconds:\n",
        "        if False:\n",
        seed=170,
    ),
    Mutant(
        "clear: what was on its way when it was cleared is dropped",
        CONTEXT,
        "        scopes = self.freshness.scopes(handle.key, account, fingerprint)\n",
        "        return True\n        scopes = self.freshness.scopes(handle.key, account, fingerprint)\n",
        seed=710,
    ),
    Mutant(
        "clear: what is cleared is erased from the disk",
        TIERS,
        "                    tier.books.discard(key)\n",
        "                    pass\n",
        seed=86,
    ),
    Mutant(
        "a peer that keeps its answer is given up",
        MEETING,
        "            return await within(READ_SECONDS, answer)\n",
        "            return await answer\n",
        seed=124,
    ),
    Mutant(
        "a peer that did not answer is met later",
        MEETINGS,
        "        peer.not_before = now + min(",
        "        peer.not_before = math.inf + min(",
        seed=16,
    ),
    Mutant(
        "a slab that moves keeps no headers that its new size has not",
        SLABS,
        "        cleared = HEADER_BYTES * (1 + self.geometry.slots_per_slab(1))  # no size has more slots\n",
        "        cleared = HEADER_BYTES * (1 + self.geometry.slots_per_slab(payload_bytes))\n",
        seed=35,
    ),
    Mutant(
        "a slab whose move was cut off keeps no old headers",
        SLABS,
        "        self.buffer[start : start + _SLAB_BYTES] = bytes(_SLAB_BYTES)\n"
        "        cleared = HEADER_BYTES * (1 + self.geometry.slots_per_slab(1))  # no size has more slots\n",
        "        sizes = [size for size in (self.slab_payload_bytes(slab), payload_bytes) if size]\n"
        "        self.buffer[start : start + _SLAB_BYTES] = bytes(_SLAB_BYTES)\n"
        "        cleared = HEADER_BYTES * (1 + max(map(self.geometry.slots_per_slab, sizes)))\n",
        seed=165,
    ),
)
