"""Open channels to other processes of the service, one per address, for callers over TCP, and what calls on them show.

A channel keeps the certificate that it was made with. When the files change, each channel is replaced at its next use,
and calls on the old one may finish. So connections made after a rotation use the new certificate. Used on one loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container

import grpc

from kvservice.aio import end_tasks
from kvservice.auth.tls import Options, TlsFiles, open_channel
from kvservice.auth.token import CallMetadata, Token
from kvservice.core.bounded_table import NODES_MAX, BoundedTable
from kvservice.wire.serving import CHANNEL_OPTIONS

RETIRED_SECONDS = 10.0  # a channel that was replaced is closed after this; calls on it have ended or are cancelled


class Channels:
    """Channels are made on first use, on the loop that runs then."""

    def __init__(
        self,
        tls: TlsFiles | None = None,
        options: Options = CHANNEL_OPTIONS,
        *,
        token: Token | None = None,
    ) -> None:
        """With more than NODES_MAX channels, the one used longest ago is closed. `token` is of the calling tenant."""
        self._tls = tls
        self._token = token or Token()
        self._options = options
        self._open: BoundedTable[str, grpc.aio.Channel] = BoundedTable(NODES_MAX, self._retire)
        self._version = 0
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel of an address: the same object until the TLS files change or the address is dropped."""
        if self._tls is not None:
            version, _ = self._tls.current()
            if version != self._version:
                self._version = version
                self.keep_only(())
        channel = self._open.get(address)
        if channel is None:
            channel = self._open.put(address, open_channel(address, self._tls, self._options))
        return channel

    def metadata_for(self, address: str) -> CallMetadata:
        """What a call to this address shows: the token, unless others could read it. Raises ConfigError."""
        return self._token.metadata_for(address, encrypted=self._tls is not None)

    def keep_only(self, addresses: Container[str]) -> None:
        """Close the channels of all other addresses. Returns at once; calls under way may still finish."""
        for address in [address for address in self._open if address not in addresses]:
            self.drop(address)

    def drop(self, address: str) -> None:
        """Close the channel of this address, if there is one, in the same way."""
        channel = self._open.pop(address)
        if channel is not None:
            self._retire(channel)

    def _retire(self, channel: grpc.aio.Channel) -> None:
        """Close the channel later: to end its calls now would look like a cancellation of their callers' tasks."""
        task = asyncio.get_running_loop().create_task(channel.close(RETIRED_SECONDS))
        self._retired[task] = channel
        task.add_done_callback(lambda done: self._retired.pop(done, None))

    async def __aenter__(self) -> Channels:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all channels. Ends the calls under way."""
        retired, self._retired = self._retired, {}
        await end_tasks(retired)
        channels = [*retired.values(), *(channel for _, channel in self._open.items())]
        for address in list(self._open):
            self._open.pop(address)
        for channel in channels:
            await channel.close(None)
