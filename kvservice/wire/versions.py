"""The version of the wire: which one a process speaks, and the refusal of a process that speaks another one.

A client states its version in the first message of a conversation: an engine when it attaches, a shard in its handshake
with a peer and in each announcement, a reader of the directory when it begins to watch. The server checks it before
anything else. The segment, the mirror and the link to the copy worker have versions of their own, with their formats.
docs/howto/upgrade.md says which versions work together and what is upgraded first. Pure.
"""

from __future__ import annotations

from kvservice.errors import another_version

PROTOCOL_VERSION = 1  # of all messages in protos/; grows with a change that an older process would misunderstand
OLDEST_SPOKEN = 1  # the oldest version that a server accepts: the one before its own, once there is one
assert PROTOCOL_VERSION - 1 <= OLDEST_SPOKEN <= PROTOCOL_VERSION


def check_version(theirs: int, who: str) -> None:
    """Raises VersionMismatch when the client speaks a version that this server does not. `who`: "the engine", …"""
    if not OLDEST_SPOKEN <= theirs <= PROTOCOL_VERSION:
        raise another_version(f"the protocol of {who}", theirs, PROTOCOL_VERSION)
