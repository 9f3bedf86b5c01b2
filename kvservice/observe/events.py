"""What the counters mean that have no metric of their own. They are the values of the label `event`.

A name with a star stands for several: the star is a reason, an outcome or a kind. docs/reference/metrics.md is made
from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping

# Of kvservice_events_total.
SHARD_EVENTS: Mapping[str, str] = {
    "abort_ignored": "slots given back that were not the engine's any more",
    "acquires_cancelled": "acquires whose engine stopped waiting",
    "announce_*": "announcements by the answer: applied, resync, stale_epoch; failed = no answer",
    "arrived_cleared": "fetched blocks not kept because a clear had covered them meanwhile",
    "arrived_too_old": "fetched blocks not kept because they were older than max_age_seconds, or from before a clear",
    "clears": "clears applied, its own and those heard of",
    "fetches_overdue": "fetches that got no answer in time",
    "find_takers_failed": "nodes that did not say how much room they have, when this one was leaving",
    "followed_blocks": "blocks of hand-offs that other nodes were told of",
    "follows": "questions of other nodes about hand-offs here",
    "follows_failed": "questions about hand-offs that the writer's node did not answer",
    "full_announcements": "announcements of everything that this node holds",
    "handoff_close_ignored": "ends of hand-offs that were not open",
    "handoffs_broken": "hand-offs whose engine left before their end",
    "handoffs_closed": "hand-offs that ended",
    "handoffs_ended_short": "acquires whose hand-off ended before their last block",
    "handoffs_opened": "hand-offs that engines began",
    "handoffs_reconciled": "hand-offs closed because their engine no longer named them",
    "handoffs_silent": "hand-offs closed because nothing was sealed for too long",
    "lease_release_ignored": "leases given back that had ended already",
    "leases_fenced": "leases named by an engine that does not hold them",
    "locate_abandoned": "leases for other nodes that stopped waiting; they expire",
    "locate_failed": "questions to other nodes for blocks that failed",
    "lookup_breaker_opened": "times that a lookup partition was left alone after repeated failures",
    "lookup_failed_*": "calls to lookup partitions that failed, by gRPC status",
    "lookup_no_time": "lookups that were not sent because their time was over",
    "members_failed": "lookup partitions that did not name the nodes",
    "hints_*": "requests with a hint of this kind: pin, prefetch, write_down, share, no_store, reuse, last_turn",
    "hints_pinned_blocks": "blocks held because a hint asked for it",
    "mirror_events": "messages of lookup partitions for the mirror",
    "mirror_fallback_*": "lookups sent as calls, by the reason why the mirror could not answer",
    "mirror_filled_up": "times that the mirror was full",
    "mirror_names_too_long": "nodes left out of the mirror because of a long name",
    "mirror_sets_not_named": "sets of holders left out of the mirror because there are too many",
    "mirror_stream_*": "streams to the mirror that ended, by reason",
    "peer_forbidden": "calls of other nodes with the name of a third",
    "pins_refused": "pins that found no room within their budget",
    "remote_release_failed": "leases at other nodes that were not given back; they expire",
    "runtime_files_remade": "times that removed sockets or records were made again",
    "seal_cleared": "stored blocks not kept because a clear had covered them meanwhile",
    "slots_reconciled": "reserved slots taken back because their engine no longer named them",
    "stats_failed_*": "lookup partitions that gave no statistics, by reason",
    "tails_asked": "hits that might go on within a block, whose tail was asked for",
    "tails_found_*": "tails promised, by where they were: local, remote, tier",
    "tails_missed_*": "tails that were not promised, by reason; as kvservice_acquires_cut_total",
    "takeover_*": "blocks read from leaving nodes, by result: ok, stale, corrupt, failed, stuck",
    "takeover_forged": "offers of nodes that do not leave",
    "takeover_strangers": "offers of nodes that are no members",
    "tier_*": "what tiers count beside their metrics, by tier and name",
    "transfer_blocks_*": "blocks of pulls, by result: ok, stale, corrupt, failed, stuck",
    "transfer_callback_errors": "ends of pulls that could not be reported",
    "transfer_deadlines": "pulls that were given up at their deadline",
    "transfer_disconnect_failed": "connections to other nodes that could not be closed",
    "transfer_job_errors": "pulls that failed with an unexpected error",
    "transfer_jobs": "pulls that ended",
    "transfer_poll_errors": "times that the transport could not say what has arrived",
    "transfer_transport_close_failed": "transports that could not be closed",
    "warm_fetched_blocks": "blocks of warmed prompts that came from elsewhere",
    "warm_held_blocks": "blocks held after they were warmed or pinned",
    "warm_let_go": "warmed prompts let go early, to make room for newer ones of their tenant",
    "warm_local_blocks": "blocks of warmed prompts that were here already",
    "warms": "prompts asked to be warmed or pinned",
    "warms_refused": "prompts not warmed because too many were under way",
    "writer_unknown": "hand-offs whose node the directory did not know",
}

# Of kvservice_lookup_events_total.
LOOKUP_EVENTS: Mapping[str, str] = {
    "announce_duplicate": "announcements that had arrived before",
    "announce_forbidden": "announcements without the proof of their node",
    "announce_resync_*": "announcements answered with a request for everything: gap, replay or unknown node",
    "announce_stale_epoch": "announcements of a boot that a newer one has replaced",
    "announce_wrong_certificate": "announcements with another node's certificate",
    "full_announcements": "announcements of everything that a node holds",
    "keys_added": "blocks announced",
    "keys_removed": "blocks withdrawn",
    "members_forgotten": "nodes forgotten after a long silence",
    "members_hidden": "nodes hidden after a silence",
    "members_left": "nodes that said that they leave",
    "sweeps_finished": "rounds over all keys that removed those of forgotten nodes",
}

# Of an engine, with a metric of their own: vllm:kvservice_<name>_total.
CONNECTOR_COUNTERS: Mapping[str, str] = {
    "load_blocks": "blocks promised to the engine and loaded from the pool",
    "load_blocks_remote": "loaded blocks that came from another node for the request",
    "loaded_blocks_slot": "blocks that workers copied from the pool's memory into the engine",
    "loaded_blocks_engine": "blocks that workers copied from another engine's KV cache",
    "loads_failed": "loads that failed after the promise and were recomputed",
    "store_blocks_planned": "blocks whose copy from the engine to the pool was planned",
    "stored_blocks": "blocks sealed in the pool",
    "store_blocks_put_off": "blocks that found no free slot in their step",
}

# Of vllm:kvservice_offloading_events_total, which the tier below vLLM's OffloadingConnector counts, in chunks.
OFFLOADING_EVENTS: Mapping[str, str] = {
    "offloading_failed": "calls of vLLM that failed with an unexpected error, which is in the log",
    "offloading_found": "chunks asked for that the pool has",
    "offloading_loaded": "chunks copied into vLLM's CPU memory",
    "offloading_missed": "chunks asked for that the pool does not have",
    "offloading_not_loaded": "chunks that were found and could not be loaded; vLLM computes them",
    "offloading_not_stored": "chunks for which the pool had no room, or that it could not store",
    "offloading_refused": "chunks neither stored nor loaded because a reset was refused",
    "offloading_resets_refused": "resets while requests held blocks; the tier is out of use until one without",
    "offloading_stored": "chunks that are in the pool, new or as before",
}

# Counted by the connectors to SGLang (pages) and LMCache (objects), and told by their own status.
SERVER_EVENTS: Mapping[str, str] = {
    "asked_again": "questions asked anew because the answer had ended meanwhile",
    "asked_pages": "pages asked for",
    "dropped_*": "pages or objects not stored, by reason",
    "fetched_pages": "pages found after the node had fetched them",
    "found_pages": "pages asked for that the pool has",
    "known_pages": "pages to be stored that the pool had already",
    "layout_left": "layouts of an engine that went, and were detached",
    "layout_refused": "objects of a layout that the pool refused",
    "load_failed": "pages that were found and could not be loaded",
    "loaded_pages": "pages copied into the server",
    "locks_expired": "locks that LMCache did not give back in time",
    "miss_*": "objects not loaded, by reason",
    "missed_*": "pages not found, by reason",
    "objects_found": "objects asked for that the pool has",
    "objects_loaded": "objects copied into the server",
    "objects_missed": "objects asked for that the pool does not have",
    "share_left_out_*": "prompts not shared with other engines, by reason",
    "stored_pages": "pages that are in the pool and were not before",
    "unlocked_twice": "locks given back that were not held",
    "unsupported_*": "calls of SGLang that this storage does not serve",
}

# Of vllm:kvservice_connector_events_total.
CONNECTOR_EVENTS: Mapping[str, str] = {
    "stock_given_back": "slots held ready that an idle engine gave back",
    "acquire_abandoned": "answers that came after their request had ended; they were given back",
    "acquire_cancelled": "questions taken back because their request ended",
    "acquire_failed": "questions to the pool that failed",
    "acquires_cut_*": "answers that promised less than was asked for, by reason; as kvservice_acquires_cut_total",
    "adapter_*": "requests not cached because of their LoRA adapter: ambiguous, changed, in_doubt, too_many, unknown",
    "asked_after_preemption": "requests that asked again after the engine had preempted them",
    "asked_again": "requests that asked again because the engine had lost blocks meanwhile",
    "asked_without_pool": "requests that found no pool to ask",
    "attach_*": "attempts to attach that failed, by the error's reason",
    "attached": "times that the engine attached to a pool",
    "copied_blocks": "blocks that workers copied from the engine into slots",
    "copy_batched_blocks": "blocks that the engine copied with one call of the driver for many",
    "copy_dropped_blocks": "blocks whose store was dropped because the copy worker was busy",
    "copy_in_process_blocks": "blocks copied by the engine because there was no copy worker",
    "copy_raised_*": "copies that raised, by the kind of error",
    "copy_worker_*": "answers of the copy worker: done, stale, failed; absent, connected, error, lost_copies, full_*",
    "copy_worker_blocks": "blocks that the copy worker copied",
    "failed_*": "entries of the connector that failed, by name; the engine went on without the cache",
    "gave_up_waiting": "requests that stopped waiting for the pool",
    "handoff_params_refused": "requests with parameters of a hand-off that make no sense",
    "handoff_without_pool": "hand-offs that found no pool",
    "handoffs_read": "requests that continue another engine's prompt",
    "handoffs_written": "requests computed for another engine",
    "load_copy_failed": "copies into the engine that failed",
    "load_layers_not_waited_for": "layers that were not there when the engine needed them, after a failure",
    "load_tails": "tails of a prompt, shorter than a block, whose load was planned",
    "load_unmapped": "loads whose pool was not mapped",
    "load_unplanned": "loads that a worker had no plan for",
    "load_verified_blocks": "loaded blocks whose digest was checked",
    "loaded_blocks": "blocks copied into the engine",
    "loaded_blocks_layerwise": "of these, the ones copied layer by layer",
    "loads_planned": "loads that were planned",
    "loan_blocks": "blocks lent to other engines of this node",
    "loan_blocks_returned": "of these, the ones given back",
    "loans_not_made": "loans that were not made because too much was lent",
    "loans_recalled_early": "loans ended early because the engine needed its memory",
    "lost": "times that the pool was lost",
    "map_failed": "pools that could not be mapped",
    "map_refused": "pools refused because they are not what was promised",
    "promises_cut_at_suspect": "answers cut at a slot that had not held what was promised",
    "promises_dropped": "answers not used because their slots had not held what was promised",
    "public_params_refused": "requests with parameters of public blocks that make no sense",
    "*_failed": "calls to the pool that failed: reserve, seal, abort, release, renew, open_handoff, close_handoff",
    "resets": "times that the engine dropped its cache",
    "resets_refused": "of these, the ones that could not be done at once",
    "seal_*": "stored blocks by the pool's answer: sealed, duplicate, stale, failed; dropped = not sent",
    "share_left_out_*": "requests not shared with other engines, by reason",
    "share_probe_agrees": "workers whose K and V agree with the model's files, so that pages are shared",
    "share_probe_differs": "workers whose K and V differ from the model's files: no page is shared",
    "session_crashed": "times that the connection to the pool ended with an unexpected error",
    "store_blocks_preempted": "blocks stored because their request was preempted",
    "tails_asked": "hits that might go on within a block, whose tail was asked for",
    "tails_promised": "tails that the pool promised",
    "store_behind": "blocks whose layers were not copied in time",
    "store_blocks_void": "planned stores that were dropped because their request had ended",
    "store_copy_failed": "copies into slots that failed",
    "store_tails_planned": "tails whose copy to the pool was planned",
    "store_tails_put_off": "tails that found no free slot",
    "store_stale": "stores whose slot was not the engine's any more",
    "store_unmapped": "stores whose pool was not mapped",
    "switches_refused": "requests whose store and load switches make no sense; neither stored nor loaded",
}


def meaning(table: Mapping[str, str], event: str) -> str | None:
    """What the table says about this event, the longest name that fits first; None when it says nothing."""
    fits = [name for name in table if name == event or ("*" in name and _fits(name, event))]
    return table[max(fits, key=lambda name: len(name) - (0 if "*" not in name else 1))] if fits else None


def _fits(name: str, event: str) -> bool:
    head, _, tail = name.partition("*")
    return len(event) > len(head) + len(tail) and event.startswith(head) and event.endswith(tail)
