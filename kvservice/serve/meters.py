"""The metrics that a router exports through Ray: kvservice_router_*, tagged with application and deployment.

Predicted hits are counted here. Shards and engines count the actual ones (kvservice_hit_local_blocks_total,
kvservice_hit_remote_blocks_total, vLLM's prefix cache), for the requests of all routers.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvservice.serve.routing import Decision, Prompt

# Seconds: the mirror answers within the first bounds, a call within the last.
LOOKUP_SECONDS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]
TAGS = ("application", "deployment")
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # name -> (help text, tags besides TAGS)
    "kvservice_router_decisions": (
        "requests routed, by reason: hit, fetch, load, cold, or fallback:<why>",
        ("reason",),
    ),
    "kvservice_router_asked_blocks": ("full blocks of the prompts that were looked up", ()),
    "kvservice_router_predicted_hit_blocks": (
        "of these, the blocks that the chosen replica should have, by place: engine, node, fetch",
        ("where",),
    ),
}
LOOKUP = ("kvservice_router_lookup_seconds", "seconds from a request to the answer of the directory, with tokenising")


class Meters:
    def __init__(self, application: str, deployment: str) -> None:
        from ray.util.metrics import Counter, Histogram  # takes a second; the reference of the metrics needs only names

        self._decisions, self._asked, self._predicted = (
            Counter(name, description=text, tag_keys=(*TAGS, *tags)) for name, (text, tags) in COUNTERS.items()
        )
        name, text = LOOKUP
        self._lookup = Histogram(name, description=text, boundaries=LOOKUP_SECONDS, tag_keys=TAGS)
        for meter in (self._decisions, self._asked, self._predicted, self._lookup):
            meter.set_default_tags({"application": application, "deployment": deployment})
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
        self._lookup.observe(max(seconds, 1e-6))

    def _count(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self._decisions.inc(1, tags={"reason": reason})
