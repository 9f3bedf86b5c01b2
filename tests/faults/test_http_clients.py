"""HTTP clients of the proxy that lie about what they send, send too much of it, or send nothing."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from kvservice.units import MiB
from tests.integration.proxy_lab import COMPLETIONS, Lab, Running

pytestmark = pytest.mark.faults

PATIENCE_SECONDS = 60.0
BODY = b'{"prompt":"x"}'


async def answered(proxy: Running, head: list[str], body: bytes) -> int:
    """The status of what is sent as it is; 0 where the connection is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.proxy.port)
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: p", "Content-Type: application/json", *head, "", ""]
    try:
        writer.write("\r\n".join(lines).encode() + body)
        line = await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
    except ConnectionError:
        return 0
    finally:
        writer.close()
    return int(line.split()[1]) if line else 0


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (["Content-Length: 14", "Transfer-Encoding: chunked"], b"0\r\n\r\n" + BODY),  # two ends of one body
        (["Content-Length: 14", "Content-Length: 5"], BODY),
        (["Content-Length: -1"], BODY),
        (["Content-Length: 14abc"], BODY),
        (["Transfer-Encoding: chunked"], b"ffffffffffffffffff\r\n" + BODY),
        (["Transfer-Encoding: chunked"], b"-e\r\n" + BODY),
        (["Content-Length: 5"], BODY),  # the rest is no next request
        (["Content-Encoding: gzip", "Content-Length: 14"], BODY),
    ],
)
async def test_a_body_whose_length_is_a_lie_reaches_no_engine(lab: Lab, head: list[str], body: bytes) -> None:
    decode = await lab.server()
    proxy = await lab.proxy([], [decode])
    status = await answered(proxy, head, body)
    assert status == 0 or 400 <= status < 500
    assert not decode.seen
    assert (await proxy.post({"prompt": "x"}))[0] == 200


async def test_a_body_that_unpacks_too_large_is_refused(lab: Lab) -> None:
    """Its size after decompression counts."""
    decode = await lab.server()
    proxy = await lab.proxy([], [decode], body_bytes_max=MiB)
    grown = gzip.compress(json.dumps({"prompt": "x" * 16 * MiB}).encode())
    assert len(grown) < MiB // 32
    head = ["Content-Encoding: gzip", f"Content-Length: {len(grown)}"]
    assert await answered(proxy, head, grown) == 413
    assert not decode.seen
    honest = gzip.compress(BODY)
    assert await answered(proxy, ["Content-Encoding: gzip", f"Content-Length: {len(honest)}"], honest) == 200
    assert len(decode.seen) == 1


async def test_clients_that_send_nothing_keep_nobody_waiting(lab: Lab) -> None:
    proxy = await lab.proxy([], [await lab.server()])
    silent = [await asyncio.open_connection("127.0.0.1", proxy.proxy.port) for _ in range(200)]
    for _, writer in silent[::2]:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nX-Slow: ")
    try:
        assert (await proxy.post({"prompt": "x"}))[0] == 200
    finally:
        for _, writer in silent:
            writer.close()


async def test_a_client_that_brings_its_own_parameters_is_refused(lab: Lab) -> None:
    decode = await lab.server()
    proxy = await lab.proxy([], [decode])
    own = '{"kvservice":{"version":1,"role":"decode","handoff":"%s","node":"n"}}' % ("0" * 32)
    twice = f'{{"kv_transfer_params":{own},"prompt":"x","kv_transfer_params":null}}'
    hidden = f'{{"prompt":"x","kv\\u005ftransfer_params":{own}}}'
    for text in (twice, hidden, f'{{"prompt":"x","vllm_xargs":{{"kv_transfer_params":{own}}}}}'):
        assert await answered(proxy, [f"Content-Length: {len(text)}"], text.encode()) == 400
    assert not decode.seen
