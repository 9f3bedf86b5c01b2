"""The KV-aware request router of Ray Serve: asks which nodes hold a prompt and lets `routing` decide. Otherwise it
falls back to Serve's own choice.

There is one instance per deployment handle, on the handle's router loop. For each request it computes tokens and block
names in a thread, asks the lookup service once, and decides. All of it has a budget (20 ms). A prompt that is not known
by then goes to Serve's power of two choices, and the reason is counted. Nothing here fails or holds a request.

Serve's FIFO mix-in is left out on purpose: it may give the replica chosen for one request to another one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from kvservice.aio import within
from kvservice.auth.token import Token
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.messages import EngineKind, HolderRun
from kvservice.observe import tracing
from kvservice.serve.holdings import Holdings, KnownNodes, find_lookups, find_tls
from kvservice.serve.load import LoadBook, SentPrefixes
from kvservice.serve.meters import Meters
from kvservice.serve.options import RouterOptions
from kvservice.serve.prompt import SENT_TO, Question, Unknown, question_of, transfer_parameters
from kvservice.serve.reader import PromptReader
from kvservice.serve.routing import Candidate, Decision, Estimate, PeerLink, Prompt, Speeds, blocks_of, decide
from kvservice.units import BlockHash, BlockKey, NodeId

log = logging.getLogger("kvservice.serve")

REQUESTS_MAX = 4096  # Requests remembered as counted, so that each counts once. A forgotten one would be counted twice.
PLANS_MAX = 512  # Plans kept until Serve says where the request went. A forgotten one is made again.
PLAN_SECONDS = 2.0  # A plan is made again after this time, because what the nodes hold has changed.
SLACK_SECONDS = 0.002  # Kept free in the budget, so that a lookup fails by its own deadline, which its breaker counts.
# for replicas that are compared by load: a request costs nothing but its place in the queue
NO_WORK = Speeds(1e-6, 0, 1.0, PeerLink(1.0))
Ranks = list[list[RunningReplica]]


@dataclass(frozen=True, slots=True)
class Place:
    """A replica's node, and the engines there that are like its own."""

    node: NodeId | None
    engines: EngineKind | None

    @property
    def digest(self) -> bytes:
        """Digest of the engines' fingerprint; b"" if it is not known."""
        return b"" if self.engines is None else self.engines.fingerprint.digest


@dataclass(slots=True)
class _Plan:
    """What is known of one request's prompt. If nothing is known, `prompt` is None and `fallback` says why."""

    prompt: Prompt | None
    fallback: str = ""
    model: str = ""
    hashes: dict[bytes, list[BlockHash]] = field(default_factory=dict)  # by fingerprint digest
    runs: dict[bytes, tuple[HolderRun, ...]] = field(default_factory=dict)  # by fingerprint digest
    keys: dict[bytes, list[BlockKey]] = field(default_factory=dict)  # by fingerprint digest: those that were looked up
    made_at: float = 0.0

    def hashes_for(self, place: Place) -> list[BlockHash]:
        found = self.hashes.get(place.digest)
        if found is None and len(self.hashes) == 1:  # the replica's node is not known yet, but all engines are alike
            found = next(iter(self.hashes.values()))
        return found or []


class KvAwareRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """For `request_router_config`: `{"request_router_class": "kvservice.serve.router.KvAwareRouter",
    "request_router_kwargs": {"tokenizer": "<folder or hub name>"}}`. The keyword arguments are those of
    RouterOptions."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Read the keyword arguments; does not block. Raises ConfigError for an unknown key or an unusable value."""
        self._options = RouterOptions.parse(kwargs)
        options = self._options
        tracing.start(options.traces, "kvservice-router", service=options.service or "default")
        self._holdings = Holdings(
            lambda: find_lookups(options.service, options.lookup_addresses),
            lambda: find_tls(options.service),
            Token.of_environment(options.token_file),
            refresh_seconds=options.refresh_seconds,
            answer_seconds=options.answer_seconds,
            warm_seconds=options.warm_seconds,
        )
        self._reader = PromptReader.shared(options)
        self._book = LoadBook()
        self._sent = SentPrefixes(options.engine_blocks, options.engine_seconds)
        self._plans: BoundedTable[str, _Plan] = BoundedTable(PLANS_MAX)
        self._counted: BoundedTable[str, None] = BoundedTable(REQUESTS_MAX)
        self._meters = Meters(self._deployment_id.app_name, self._deployment_id.name)
        self._failures: Counter[str] = Counter()
        self._random = random.Random()

    # -- called by Serve ----

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Ranks:
        """Ranks of replicas, best first. Ends within the budget, and never raises."""
        if pending_request is None:
            return await self._default(candidate_replicas, None)
        self._listen(pending_request)
        before = replace(pending_request.routing_context)
        parent = tracing.parent_in(*transfer_parameters(pending_request.args, pending_request.kwargs))
        try:
            with tracing.request_span("route", parent, request_id=pending_request.metadata.request_id) as span:
                groups = await self._choose(pending_request)
                span.set(replica=name_of(groups[0][0]) if groups else "")
        except Exception as error:  # noqa: BLE001  Serve's routing loop: whatever is wrong here, the request goes on
            self._note_failure(error)
            self._count_fallback(pending_request, "error")
            groups = None
        if groups is not None:
            return groups
        pending_request.routing_context = before
        return await self._default(candidate_replicas, pending_request)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        now = time.monotonic()
        request, name = pending_request.metadata.internal_request_id, replica_id.to_full_id_str()
        try:
            self._book.routed(request, name, now)
            plan = self._plans.pop(request)
            replica = self._replicas.get(replica_id)
            if plan is not None and plan.hashes and replica is not None:
                self._remember(plan, replica, now)
        except Exception as error:  # noqa: BLE001  the request is on its way: what is wrong here is ours alone
            self._note_failure(error)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._book.completed(internal_request_id, replica_id.to_full_id_str(), time.monotonic())

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget_others()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._forget_others()
        self._holdings.wake()
        self._reader.wake()

    def _listen(self, pending: PendingRequest) -> None:
        """Let the sender of a request say which replica got it: Serve says so only of what it sends itself."""
        sent_to, loop = pending.kwargs.pop(SENT_TO, None), asyncio.get_running_loop()

        def tell(told: Future[str]) -> None:
            replica = ReplicaID(told.result(), self._deployment_id)
            loop.call_soon_threadsafe(self.on_request_routed, pending, replica, None)

        if isinstance(sent_to, Future):
            sent_to.add_done_callback(tell)

    # -- one decision ----

    async def _default(self, candidates: list[RunningReplica], pending: PendingRequest | None) -> Ranks:
        found: Ranks = await PowerOfTwoChoicesRequestRouter.choose_replicas(self, candidates, pending)
        return found

    async def _choose(self, pending: PendingRequest) -> Ranks | None:
        """Choose by what is known. None if nothing is known beyond what Serve knows itself."""
        if len(self._replicas) < 2:
            self._count_fallback(pending, "one_replica")
            return None
        replicas = self._allowed(pending)
        if not replicas:
            return None  # Serve has no replica either; it asks again
        by_load = self._options.policy == "load"
        plan = _Plan(Prompt(1, 1, 0)) if by_load else await self._plan(pending, replicas)
        if plan.prompt is None:
            self._count_fallback(pending, plan.fallback)
            return None
        replicas = [replica for replica in replicas if replica.replica_id in self._replicas]  # some left meanwhile
        if not replicas:
            return None
        now = time.monotonic()
        candidates = [self._by_load(r, now) if by_load else self._by_cost(plan, r, now) for r in replicas]
        decision = decide(plan.prompt, candidates, [self._random.random() for _ in candidates])
        self._book.decided(pending.metadata.internal_request_id, decision.best.replica, decision.best.work_seconds, now)
        by_name = {name_of(replica): replica for replica in replicas}
        if self._first_time(pending):
            self._meters.decided(decision, plan.prompt)
            self._fetch_ahead(plan, decision.best, by_name[decision.best.replica])
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %s: %s", pending.metadata.request_id, explain(decision, plan.prompt))
        return [[by_name[name] for name in group] for group in decision.groups]

    def _fetch_ahead(self, plan: _Plan, best: Estimate, replica: RunningReplica) -> None:
        """Let the chosen node fetch now what it lacks, while the request is on its way and waits for its turn."""
        place = self._place(self._holdings.known, replica, plan.model)
        if best.fetched_blocks and place.node is not None:
            self._holdings.warm(place.node, place.digest, plan.keys.get(place.digest, [])[: best.hit_blocks])

    def _allowed(self, pending: PendingRequest) -> list[RunningReplica]:
        """The replicas to choose from. Serve's own preference comes first: those that have a multiplexed model, else
        those nearby."""
        if pending.metadata.multiplexed_model_id:
            ids = self.apply_multiplex_routing(pending_request=pending)
        else:
            ids = self.apply_locality_routing(pending_request=pending)
        return [self._replicas[replica_id] for replica_id in ids if replica_id in self._replicas]

    def _by_load(self, replica: RunningReplica, now: float) -> Candidate:
        name = name_of(replica)
        requests = max(self._reported(replica) or 0, self._book.in_flight(name, now))
        return Candidate(name, float(requests), NO_WORK, full=requests >= replica.max_ongoing_requests)

    def _by_cost(self, plan: _Plan, replica: RunningReplica, now: float) -> Candidate:
        name, known = name_of(replica), self._holdings.known
        place = self._place(known, replica, plan.model)
        reported = self._reported(replica)
        wait = self._book.wait(name, reported, now)
        return Candidate(
            replica=name,
            wait_seconds=wait.seconds(self._book.request_seconds, self._options.decoding_share),
            speeds=speeds_of(known, place, self._options),
            node=place.node,
            engine_blocks=self._sent.leading(name, plan.hashes_for(place), now),
            runs=plan.runs.get(place.digest, ()),
            full=max(reported or 0, self._book.in_flight(name, now)) >= replica.max_ongoing_requests,
        )

    def _reported(self, replica: RunningReplica) -> int | None:
        reported: int | None = self._replica_queue_len_cache.get(replica.replica_id)
        return reported

    # -- what is known of a prompt ----

    async def _plan(self, pending: PendingRequest, replicas: Sequence[RunningReplica]) -> _Plan:
        """The plan for a request. It is kept while Serve tries to place the request, and made again if that takes
        seconds."""
        request, now = pending.metadata.internal_request_id, time.monotonic()
        plan = self._plans.get(request)
        if plan is None or now - plan.made_at > PLAN_SECONDS:
            plan = await self._make_plan(pending, replicas, now)
            plan.made_at = now
            self._plans.put(request, plan)
        return plan

    async def _make_plan(self, pending: PendingRequest, replicas: Sequence[RunningReplica], begun: float) -> _Plan:
        self._holdings.wake()
        self._reader.wake()
        budget = self._options.budget_ms / 1e3
        try:
            question = question_of(pending.args, pending.kwargs, pending.metadata.multiplexed_model_id)
            if not self._holdings.connected:
                raise Unknown("no_service")
            places = [self._place(self._holdings.known, replica, question.model) for replica in replicas]
            engines = {place.digest: place.engines for place in places if place.engines is not None}
            if not engines:
                raise Unknown("no_engines")
            return await within(budget + SLACK_SECONDS, self._look_up(question, engines, begun + budget))
        except Unknown as unknown:
            return _Plan(None, unknown.reason)
        except asyncio.TimeoutError:
            return _Plan(None, "late")
        finally:
            self._meters.looked_up(time.monotonic() - begun)

    async def _look_up(self, question: Question, engines: Mapping[bytes, EngineKind], deadline: float) -> _Plan:
        named = await self._reader.read(question, engines)
        if len({kind.layout.block_tokens for kind in engines.values()}) > 1:
            raise Unknown("mixed_block_sizes")
        prompts = [
            Prompt(named.tokens, tokens, blocks_of(named.tokens, tokens, len(named.keys[digest])))
            for digest, tokens in ((digest, kind.layout.block_tokens) for digest, kind in engines.items())
        ]
        plan = _Plan(prompts[0], model=question.model, hashes=dict(named.hashes))
        asked = {digest: keys[: p.block_count] for (digest, keys), p in zip(named.keys.items(), prompts, strict=True)}
        left = deadline - time.monotonic()
        if left <= 0:
            raise Unknown("late")
        answers = await asyncio.gather(*[self._holdings.resolve(keys, left) for keys in asked.values()])
        if not any(answer.complete or answer.runs for answer in answers):
            raise Unknown("lookup_failed")
        plan.keys = asked
        plan.runs = {digest: answer.runs for digest, answer in zip(asked, answers, strict=True)}
        return plan

    def _place(self, known: KnownNodes, replica: RunningReplica, model: str) -> Place:
        info = getattr(replica, "_replica_info", None)
        node = known.node_of(replica.node_id, getattr(info, "node_ip", None))
        return Place(node, known.engines_at(node, model, self._options.namespace))

    def _remember(self, plan: _Plan, replica: RunningReplica, now: float) -> None:
        place = self._place(self._holdings.known, replica, plan.model)
        self._sent.remember(name_of(replica), plan.hashes_for(place), now)

    # -- counting ----

    def _forget_others(self) -> None:
        names = [replica_id.to_full_id_str() for replica_id in self._replicas]
        self._book.keep(names)
        self._sent.keep(names)

    def _first_time(self, pending: PendingRequest) -> bool:
        """Whether this request is counted for the first time; Serve may try to place it several times."""
        request = pending.metadata.internal_request_id
        if request in self._counted:
            return False
        self._counted.put(request, None)
        return True

    def _count_fallback(self, pending: PendingRequest, reason: str) -> None:
        if self._first_time(pending):
            self._meters.fell_back(reason)
            log.debug("request %s: routed by Serve's default: %s", pending.metadata.request_id, reason)

    def _note_failure(self, error: Exception) -> None:
        kind = type(error).__name__
        self._failures[kind] += 1
        if self._failures[kind] == 1:
            log.error("KV-aware routing failed, so Serve's default is used instead: %s", kind, exc_info=error)


def name_of(replica: RunningReplica) -> str:
    return str(replica.replica_id.to_full_id_str())


def speeds_of(known: KnownNodes, place: Place, options: RouterOptions) -> Speeds:
    """The speeds to compare with. Prefill is the average over the engines of this fingerprint, for all of them: a
    single engine's own figure is old if it got few prompts lately, and slow if its first ones were, and then it would
    never get one again."""
    default = PeerLink(options.fetch_bytes_per_second, options.fetch_overhead_ms / 1e3)
    per_token = 1 / options.prefill_tokens_per_second
    if place.engines is None or place.node is None:
        return Speeds(known.seconds_per_token(None) or per_token, 0, options.load_bytes_per_second, default)
    links = {
        peer.node_id: PeerLink(peer.bytes_per_second, peer.overhead_seconds)
        for peer in known.nodes[place.node].stats.peers
        if peer.bytes_per_second > 0
    }
    return Speeds(
        seconds_per_token=known.seconds_per_token(place.digest) or per_token,
        block_bytes=place.engines.layout.payload_bytes,
        load_bytes_per_second=options.load_bytes_per_second,
        link=default,
        links=links,
    )


def explain(decision: Decision, prompt: Prompt) -> str:
    """One line for people: the reason, and what each replica would have cost."""
    rows = [
        f"{e.replica} {e.seconds * 1e3:.1f} ms (wait {e.wait_seconds * 1e3:.1f}, move {e.move_seconds * 1e3:.1f}, "
        f"compute {e.compute_seconds * 1e3:.1f}; blocks {e.engine_blocks} engine, {e.node_blocks} node, "
        f"{e.fetched_blocks} fetched{', full' if e.full else ''})"
        for e in decision.estimates
    ]
    return f"{decision.reason.value} of {prompt.tokens} tokens, {prompt.block_count} blocks: {'; '.join(rows)}"
