"""Lists the blocks of a service, with what is known of each. Never tokens, and never their bytes.

Shards answer in pages and look at a bounded number of slots for each, so their other work goes on in between.
Everything runs on the caller's loop. Nothing is raised for shards that do not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from kvservice.aio import ask_each
from kvservice.client.channels import Channels
from kvservice.errors import ConfigError, InvalidRequest
from kvservice.wire.calls import call_in_time
from kvservice.wire.figures import check_figures
from kvservice.wire.status import error_from_rpc
from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc

CALL_SECONDS = 3.0  # for one page, which takes a shard a few milliseconds
NODES_AT_ONCE = 8  # nodes that are read in parallel; each has one page under way
PRIMARY, SECONDARY = "primary", "secondary"
MEMORY = "memory"  # slots are listed; what lies in tiers below has figures in `kvservice status`


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """Which slots are listed. An empty field lets every slot through."""

    states: tuple[str, ...] = ()  # as in core.store.slots.SHOWN_STATES; empty = all but free ones
    model: str = ""  # the whole name
    tenant: str | None = None
    key_prefix: str = ""  # hex


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A slot, and the block in it."""

    node_id: str
    slot: int
    state: str
    bytes: int
    tenant: str
    key: str  # hex; "" = the slot holds no block, and the fields below are empty
    model: str  # "" = not known, for example after a restart of the shard
    position: int  # in its chain, from 0
    copy: str  # PRIMARY or SECONDARY: another node has the primary copy
    tier: str
    age_seconds: float  # since it was sealed on this node
    idle_seconds: float  # since its last use
    uses: int  # times it was used again, as the eviction policy counts them


@dataclass(frozen=True, slots=True)
class BlockList:
    blocks: tuple[BlockRow, ...]  # by node, then by slot
    complete: bool  # False: there are more than were asked for
    problems: tuple[str, ...]  # nodes that did not answer


async def list_blocks(channels: Channels, addresses: Mapping[str, str], wanted: BlockFilter, limit: int) -> BlockList:
    """At most `limit` matching slots of the shards at these addresses, by node.

    Raises InvalidRequest for a filter that cannot match, and Unauthenticated if the service has tenants and the token
    is missing or wrong.
    """
    found = await ask_each(
        lambda node: _list_node(channels, node, addresses[node], wanted, limit), sorted(addresses), NODES_AT_ONCE
    )
    rows = [row for of_node, _, _ in found for row in of_node]
    complete = len(rows) <= limit and all(is_all for _, is_all, _ in found)
    return BlockList(tuple(rows[:limit]), complete, tuple(problem for _, _, problem in found if problem))


async def _list_node(
    channels: Channels, node: str, address: str, wanted: BlockFilter, limit: int
) -> tuple[list[BlockRow], bool, str]:
    """(its rows, whether these are all, why it could not be read or "")."""
    stub = shard_pb2_grpc.AdminServiceStub(channels.get(address))
    request = shard_pb2.ListBlocksRequest(
        states=wanted.states, model=wanted.model, tenant=wanted.tenant, key_prefix=wanted.key_prefix
    )
    rows: list[BlockRow] = []
    try:
        while len(rows) <= limit:
            metadata = channels.metadata_for(address)
            reply = await call_in_time(stub.ListBlocks, request, CALL_SECONDS, metadata)
            reply = check_figures(reply, f"blocks of node {node}")
            rows += [_row(node, one) for one in reply.blocks]
            if not reply.more:
                return rows, True, ""
            if reply.next_slot <= request.start_slot:  # it would go on for ever
                return rows, False, f"node {node} named a page that it had given already"
            request.start_slot = reply.next_slot
    except grpc.aio.AioRpcError as error:
        problem = error_from_rpc(error, f"blocks of node {node}")
        if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED):
            raise problem from error
        return rows, False, problem.message
    except (ConfigError, InvalidRequest) as error:
        return rows, False, error.message
    return rows, False, ""


def _row(node: str, one: shard_pb2.ListedBlock) -> BlockRow:
    return BlockRow(
        node,
        one.slot,
        one.state,
        one.payload_bytes,
        one.tenant,
        one.key.hex(),
        one.model,
        one.position,
        "" if not one.key else SECONDARY if one.secondary else PRIMARY,
        MEMORY,
        one.age_seconds,
        one.idle_seconds,
        one.uses,
    )
