"""The metrics that a router exports through Ray: kvservice_router_*, tagged with application and deployment.

Predicted hits are counted here. Shards and engines count the actual ones (kvservice_hit_local_blocks_total,
kvservice_hit_remote_blocks_total, vLLM's prefix cache), for the requests of all routers.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Histogram

from kvservice.serve.routing import Decision, Prompt

LOOKUP_MS = [0.5, 1, 2, 5, 10, 20, 50, 100]
TAGS = ("application", "deployment")


class Meters:
    def __init__(self, application: str, deployment: str) -> None:
        common = {"application": application, "deployment": deployment}
        self._decisions = Counter(
            "kvservice_router_decisions",
            description="Requests routed, by reason: hit, fetch, load, cold, or fallback:<why>.",
            tag_keys=(*TAGS, "reason"),
        )
        self._asked = Counter(
            "kvservice_router_asked_blocks",
            description="Full blocks of the prompts that were looked up.",
            tag_keys=TAGS,
        )
        self._predicted = Counter(
            "kvservice_router_predicted_hit_blocks",
            description="Of these, the blocks that the chosen replica should have, by place: engine, node, fetch.",
            tag_keys=(*TAGS, "where"),
        )
        self._lookup = Histogram(
            "kvservice_router_lookup_ms",
            description="Milliseconds from a request to the answer of the lookup service, with tokenising.",
            boundaries=LOOKUP_MS,
            tag_keys=TAGS,
        )
        for meter in (self._decisions, self._asked, self._predicted, self._lookup):
            meter.set_default_tags(common)
        self.reasons: dict[str, int] = {}  # for this router; readable without Ray

    def decided(self, decision: Decision, prompt: Prompt) -> None:
        self._count(decision.reason.value)
        if prompt.block_count:
            self._asked.inc(prompt.block_count)
        best = decision.best
        for where, count in (
            ("engine", best.engine_blocks),
            ("node", best.node_blocks),
            ("fetch", best.fetched_blocks),
        ):
            if count:
                self._predicted.inc(count, tags={"where": where})

    def fell_back(self, reason: str) -> None:
        self._count(f"fallback:{reason}")

    def looked_up(self, seconds: float) -> None:
        self._lookup.observe(max(seconds * 1e3, 1e-3))

    def _count(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self._decisions.inc(1, tags={"reason": reason})
