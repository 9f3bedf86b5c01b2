"""The prefill/decode proxy between real HTTP clients and real HTTP servers on loopback."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time

import aiohttp
import openai
import pytest

from kvservice.proxy.plan import TIMED_OUT, ProxyAction, Relay
from kvservice.proxy.relay import ClientExchange
from kvservice.proxy.servers import Role
from kvservice.testing.eventually import eventually_async
from tests.integration.openai_server import TOKENS, FakeServer
from tests.integration.proxy_lab import COMPLETIONS, Lab

LONG = "a long prompt " * 100
CHAT = "/v1/chat/completions"
TEXT = "".join(TOKENS)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def is_id(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None


# ---- the hand-off


async def test_prefill_and_decode_are_under_way_together_with_one_id(lab: Lab) -> None:
    prefill, decode = await lab.server(node="node-p", hold=True), await lab.server(hold=True)
    proxy = await lab.proxy([prefill], [decode])
    asking = asyncio.create_task(proxy.post({"model": "m", "prompt": LONG, "max_tokens": 3}))
    await decode.until(lambda: len(decode.seen) == 1)
    await prefill.until(lambda: len(prefill.seen) == 1)
    assert not prefill.seen[0].answered
    prefill.release()
    await prefill.until(lambda: prefill.seen[0].answered)
    decode.release()
    status, body = await asking
    assert status == 200 and json.loads(body)["choices"][0]["text"] == "".join(TOKENS[:3])

    sent = prefill.seen[0].body
    assert is_id(prefill.seen[0].handoff)
    assert (sent["max_tokens"], sent["n"], sent["stream"], sent["prompt"]) == (1, 1, False, LONG)
    assert prefill.seen[0].params == {
        "kvservice": {"version": 1, "role": "prefill", "handoff": prefill.seen[0].handoff},
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }
    ours = {"version": 1, "role": "decode", "handoff": prefill.seen[0].handoff, "node": "node-p"}
    params = {"kvservice": ours, "do_remote_prefill": True, "do_remote_decode": False}
    assert decode.seen[0].body == {"model": "m", "prompt": LONG, "max_tokens": 3, "kv_transfer_params": params}


async def test_the_node_is_learnt_by_a_probe_before_the_first_request(lab: Lab) -> None:
    prefill, decode = await lab.server(node="node-p"), await lab.server()
    proxy = await lab.proxy([prefill], [decode])
    (probe,) = prefill.probes
    assert probe.body["model"] == "model-x" and probe.body["max_tokens"] == 1 and is_id(probe.handoff)
    assert not decode.probes
    servers = json.loads((await proxy.get("/health"))[1])["servers"]
    assert servers[0] == {
        "role": "prefill",
        "url": prefill.url,
        "healthy": True,
        "in_flight": 0,
        "node": "node-p",
        "hands_off": True,
    }


async def test_while_the_node_is_unknown_decode_follows_prefill(lab: Lab) -> None:
    """The probes are refused for want of a key, so only the client's own request can teach the proxy."""
    prefill, decode = await lab.server(api_key="secret", node="node-p"), await lab.server(api_key="secret")
    proxy = await lab.proxy([prefill], [decode], api_key="wrong")
    await proxy.settled(nodes=False)
    prefill.hold = True
    asking = asyncio.create_task(proxy.post({"prompt": LONG}, Authorization="Bearer secret"))
    await prefill.until(lambda: len(prefill.seen) == 1)
    await asyncio.sleep(0.05)
    assert not decode.seen
    prefill.release()
    assert (await asking)[0] == 200
    assert decode.seen[0].handoff == prefill.seen[0].handoff
    assert {server.node for server in proxy.proxy.pool if server.role is Role.PREFILL} == {"node-p"}


async def test_the_proxys_own_key_serves_its_probes(lab: Lab) -> None:
    prefill, decode = await lab.server(api_key="secret"), await lab.server(api_key="secret")
    proxy = await lab.proxy([prefill], [decode], api_key="secret")
    await proxy.settled()
    status, body = await proxy.post({"prompt": LONG})
    assert status == 401 and json.loads(body) == {"error": "Unauthorized"}  # the client has none


async def test_a_server_that_came_back_on_another_node_is_learnt_again(lab: Lab) -> None:
    port = free_port()
    prefill, decode = await lab.server(node="node-1", port=port), await lab.server()
    proxy = await lab.proxy([prefill], [decode])
    await proxy.post({"prompt": LONG})
    await prefill.stop()
    assert (await proxy.post({"prompt": LONG}))[0] == 200
    assert {server.node for server in proxy.proxy.pool if server.role is Role.PREFILL} == {None}
    again = await lab.server(node="node-2", port=port)
    await eventually_async(lambda: any(server.node for server in proxy.proxy.pool), "the node of the prefill server")
    await proxy.post({"prompt": LONG})
    nodes = [(seen.params or {}).get("kvservice", {}).get("node") for seen in decode.seen]
    assert nodes == ["node-1", "node-1", None, "node-2"] or nodes == ["node-1", None, "node-2"]
    assert decode.seen[-1].handoff == again.seen[-1].handoff


async def test_a_server_that_moved_has_decode_start_again(lab: Lab) -> None:
    """Restarted so quickly that no check and no request saw it away."""
    prefill, decode = await lab.server(node="node-1"), await lab.server(hold=True)
    proxy = await lab.proxy([prefill], [decode])
    prefill.node = "node-2"
    asking = asyncio.create_task(proxy.post({"prompt": LONG}))
    await decode.until(lambda: len(decode.seen) == 2 and decode.seen[0].cancelled)
    decode.release()
    assert (await asking)[0] == 200
    params = decode.seen[1].params
    assert params is not None and params["kvservice"]["node"] == "node-2"
    assert decode.seen[1].handoff == prefill.seen[0].handoff


async def test_a_prefill_server_without_the_connector_gets_no_work(lab: Lab) -> None:
    prefill, decode = await lab.server(node=None), await lab.server()
    proxy = await lab.proxy([prefill], [decode])
    await proxy.settled(nodes=False)
    await prefill.until(lambda: len(prefill.probes) > 0)
    await eventually_async(lambda: any(server.plain for server in proxy.proxy.pool), "a server known as plain")
    assert (await proxy.post({"prompt": LONG}))[0] == 200
    assert not prefill.seen and decode.seen[0].params is None


async def test_short_and_multiple_prompts_go_straight_to_decode(lab: Lab) -> None:
    prefill, decode = await lab.server(), await lab.server()
    proxy = await lab.proxy([prefill], [decode])
    raw = b'{ "prompt": "short",  "temperature":0.10 }'
    async with proxy.session.post(proxy.url + COMPLETIONS, data=raw) as response:
        assert response.status == 200
    await proxy.post({"prompt": [LONG, LONG]})
    assert not prefill.seen
    assert decode.seen[0].raw == raw and decode.seen[1].params is None


async def test_both_servers_hear_one_request_id(lab: Lab) -> None:
    prefill, decode = await lab.server(), await lab.server()
    proxy = await lab.proxy([prefill], [decode])
    for given in ({}, {"X-Request-Id": "mine"}):
        await proxy.post({"prompt": LONG}, **given)
    ids = [[seen.headers["X-Request-Id"] for seen in server.seen] for server in (prefill, decode)]
    assert ids[0] == ids[1] and len(ids[0][0]) == 32 and ids[0][1] == "mine"


# ---- streaming and the openai client


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_passes_byte_for_byte_as_it_comes(lab: Lab, path: str) -> None:
    prefill, decode = await lab.server(), await lab.server()
    proxy = await lab.proxy([prefill], [decode])
    body = {"prompt": LONG, "messages": [{"role": "user", "content": LONG}], "stream": True}
    times = []
    async with proxy.session.post(proxy.url + path, json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["X-Server"] == "fake"
        got = b""
        async for chunk in response.content.iter_any():
            times.append(time.monotonic())
            got += chunk
    assert got == b"".join(decode.events(path))
    assert len(times) >= 3 and times[-1] - times[0] > 0.02  # not all at the end
    assert prefill.seen[0].path == path


async def test_the_openai_client_works_against_the_proxy(lab: Lab) -> None:
    prefill, decode = await lab.server(api_key="k"), await lab.server(api_key="k")
    proxy = await lab.proxy([prefill], [decode], api_key="k")
    await proxy.settled()
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="k", max_retries=0) as client:
        assert [model.id async for model in await client.models.list()] == ["model-x"]
        whole = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": LONG}])
        assert whole.choices[0].message.content == TEXT
        stream = await client.completions.create(model="m", prompt=LONG, stream=True)
        assert "".join([part.choices[0].text async for part in stream]) == TEXT
        assert len(prefill.seen) == 2

        decode.die_after = 2
        broken = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": LONG}], stream=True
        )
        text = ""
        with pytest.raises(openai.APIError, match="middle of its answer"):
            async for part in broken:
                text += part.choices[0].delta.content or ""
        assert text == "".join(TOKENS[:2])

        with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
            await client.completions.create(model="m", prompt="x", extra_body={"kv_transfer_params": {}})


# ---- prefill fails


async def test_prefill_that_dies_is_done_elsewhere(lab: Lab) -> None:
    """Decode starts again."""
    dying, other = await lab.server(node="n-0", hold=True), await lab.server(node="n-1")
    decode = await lab.server(hold=True)
    proxy = await lab.proxy([dying, other], [decode], tries=3)
    asking = asyncio.create_task(proxy.post({"prompt": LONG}))
    await dying.until(lambda: len(dying.seen) == 1)
    await decode.until(lambda: len(decode.seen) == 1)
    await dying.stop()
    await decode.until(lambda: len(decode.seen) == 2 and decode.seen[0].cancelled)
    decode.release()
    assert (await asking)[0] == 200
    assert decode.seen[0].handoff == dying.seen[0].handoff
    assert decode.seen[1].handoff == other.seen[0].handoff != dying.seen[0].handoff
    params = decode.seen[1].params
    assert params is not None and params["kvservice"]["node"] == "n-1"


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_with_every_prefill_server_failing_decode_answers_alone(lab: Lab, status: int) -> None:
    prefill = [await lab.server(), await lab.server()]
    decode = await lab.server()
    proxy = await lab.proxy(prefill, [decode], tries=3)
    decode.hold = True
    for server in prefill:
        server.status = status
    asking = asyncio.create_task(proxy.post({"prompt": LONG}))
    await decode.until(lambda: bool(decode.seen) and decode.seen[-1].params is None)
    decode.release()
    assert (await asking)[0] == 200
    assert all(len(server.seen) == 1 for server in prefill)


async def test_prefill_that_takes_too_long_is_given_up(lab: Lab) -> None:
    prefill, decode = await lab.server(hold=True), await lab.server()
    decode.hold = True
    proxy = await lab.proxy([prefill], [decode], prefill_seconds=0.2)
    asking = asyncio.create_task(proxy.post({"prompt": LONG}))
    await decode.until(lambda: len(decode.seen) == 2)
    decode.release()
    assert (await asking)[0] == 200
    assert decode.seen[1].params is None
    await prefill.until(lambda: prefill.seen[0].cancelled)


async def test_prefill_that_fails_after_the_first_byte_costs_nothing(lab: Lab) -> None:
    prefill, decode = await lab.server(hold=True), await lab.server()
    proxy = await lab.proxy([prefill], [decode])
    async with proxy.session.post(proxy.url + COMPLETIONS, json={"prompt": LONG, "stream": True}) as response:
        first = await response.content.readline()
        await prefill.stop()
        rest = await response.read()
    assert first + rest == b"".join(decode.events(COMPLETIONS))
    assert len(decode.seen) == 1


# ---- decode fails


async def test_decode_that_dies_beside_prefill_is_replaced_later(lab: Lab) -> None:
    """It is replaced once prefill is done."""
    prefill = await lab.server(hold=True)
    dying, other = await lab.server(hold=True), await lab.server()
    proxy = await lab.proxy([prefill], [dying, other])
    asking = asyncio.create_task(proxy.post({"prompt": LONG}))
    await dying.until(lambda: len(dying.seen) == 1)
    await prefill.until(lambda: len(prefill.seen) == 1)
    await dying.stop()
    await asyncio.sleep(0.05)  # for its death to have been noticed
    prefill.release()
    assert (await asking)[0] == 200
    assert len(prefill.seen) == 1 and other.seen[0].handoff == prefill.seen[0].handoff


async def test_decode_that_dies_after_prefill_keeps_the_id(lab: Lab) -> None:
    prefill, dying, other = await lab.server(), await lab.server(hold=True), await lab.server()
    proxy = await lab.proxy([prefill], [dying, other])
    asking = asyncio.create_task(proxy.post({"prompt": LONG}))
    await dying.until(lambda: len(dying.seen) == 1)
    await prefill.until(lambda: bool(prefill.seen) and prefill.seen[0].answered)
    await asyncio.sleep(0.05)  # for the answer to have been read
    await dying.stop()
    assert (await asking)[0] == 200
    assert len(prefill.seen) == 1
    assert other.seen[0].handoff == dying.seen[0].handoff == prefill.seen[0].handoff


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_that_breaks_before_the_first_byte_is_replaced(lab: Lab, stream: bool) -> None:
    """In a stream: inside its first event. Else: anywhere."""
    breaking, other = await lab.server(die_after=0), await lab.server()
    proxy = await lab.proxy([], [breaking, other])
    status, body = await proxy.post({"prompt": "short", "stream": stream})
    assert status == 200 and len(breaking.seen) == 1
    assert not stream or body == b"".join(other.events(COMPLETIONS))


async def test_decode_that_breaks_midway_ends_with_an_error(lab: Lab) -> None:
    decode, idle = await lab.server(die_after=2), await lab.server()
    proxy = await lab.proxy([], [decode, idle])
    _, body = await proxy.post({"prompt": "short", "stream": True})
    good = b"".join(decode.events(COMPLETIONS)[:2])
    assert body.startswith(good)
    error, end, nothing = body[len(good) :].split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "upstream_error"
    assert (end, nothing) == (b"data: [DONE]", b"")
    assert not idle.seen


async def test_without_a_decode_server_the_client_gets_one_error(lab: Lab) -> None:
    prefill, decode = await lab.server(), [await lab.server(status=500), await lab.server(status=503)]
    proxy = await lab.proxy([prefill], decode)
    status, body = await proxy.post({"prompt": LONG})
    assert status == 502 and json.loads(body)["error"]["type"] == "upstream_error"
    assert all(len(server.seen) == 1 for server in decode)
    await proxy.idle()


# ---- refusals, limits, clients that leave


async def test_a_refusal_is_passed_on_and_cancels_the_other_half(lab: Lab) -> None:
    prefill, decode = await lab.server(hold=True), await lab.server(status=422)
    proxy = await lab.proxy([prefill], [decode])
    async with proxy.session.post(proxy.url + COMPLETIONS, json={"prompt": LONG}) as response:
        assert response.status == 422 and response.headers["X-Server"] == "fake"
        assert (await response.json())["error"]["message"] == "made up 422"
    await prefill.until(lambda: not prefill.seen or prefill.seen[0].cancelled)

    prefill.status, prefill.hold, decode.status, decode.hold = 404, False, 200, True
    status, body = await proxy.post({"prompt": LONG})
    assert status == 404 and json.loads(body)["error"]["message"] == "made up 404"
    await decode.until(lambda: len(decode.seen) < 2 or decode.seen[1].cancelled)
    await proxy.idle()


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_cancels_both_requests(lab: Lab, streaming: bool) -> None:
    prefill = await lab.server(hold=True)
    decode = await lab.server(hold=not streaming, tokens=("tick",) * 500)
    proxy = await lab.proxy([prefill], [decode])
    response = None
    if streaming:
        response = await proxy.session.post(proxy.url + COMPLETIONS, json={"prompt": LONG, "stream": True})
        await response.content.readline()
        response.close()
    else:
        asking = asyncio.create_task(proxy.post({"prompt": LONG}))
        await decode.until(lambda: len(decode.seen) == 1)
        await prefill.until(lambda: len(prefill.seen) == 1)
        asking.cancel()
    await decode.until(lambda: decode.seen[0].cancelled)
    await prefill.until(lambda: prefill.seen[0].cancelled)
    await proxy.idle()
    counted = (await proxy.get("/metrics"))[1].decode()
    assert 'kvservice_proxy_requests_total{path="/v1/completions",status="left"} 1.0' in counted
    assert f'kvservice_proxy_cancelled_total{{role="prefill",server="{prefill.url}"}} 1.0' in counted


async def test_a_client_may_not_set_the_parameters_and_must_send_json(lab: Lab) -> None:
    decode = await lab.server()
    proxy = await lab.proxy([], [decode])
    status, body = await proxy.post({"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}})
    assert status == 400 and "kv_transfer_params" in json.loads(body)["error"]["message"]
    async with proxy.session.post(proxy.url + COMPLETIONS, data=b"{") as response:
        assert response.status == 400 and (await response.json())["error"]["type"] == "invalid_request_error"
    assert not decode.seen


async def test_large_bodies_and_unknown_paths_get_openais_errors(lab: Lab) -> None:
    proxy = await lab.proxy([], [await lab.server()], body_bytes_max=1000)
    status, body = await proxy.post({"prompt": "x" * 2000})
    assert status == 413 and json.loads(body)["error"]["code"] == 413
    status, body = await proxy.get("/v1/embeddings")
    assert status == 404 and json.loads(body)["error"]["code"] == 404
    status, body = await proxy.get(COMPLETIONS)
    assert status == 405 and json.loads(body)["error"]["code"] == 405


async def test_beyond_the_limit_the_client_is_told_when_to_retry(lab: Lab) -> None:
    decode = await lab.server(hold=True)
    proxy = await lab.proxy([], [decode], in_flight_max=1)
    first = asyncio.create_task(proxy.post({"prompt": "x"}))
    await decode.until(lambda: len(decode.seen) == 1)
    async with proxy.session.post(proxy.url + COMPLETIONS, json={"prompt": "x"}) as response:
        assert response.status == 503 and response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["type"] == "overloaded"
    decode.release()
    assert (await first)[0] == 200
    assert (await proxy.post({"prompt": "x"}))[0] == 200


async def test_a_request_that_takes_too_long_ends_with_an_error(lab: Lab) -> None:
    prefill, decode = await lab.server(hold=True), await lab.server(hold=True)
    proxy = await lab.proxy([prefill], [decode], request_seconds=0.2)
    status, body = await proxy.post({"prompt": LONG})
    assert status == 504 and json.loads(body)["error"]["type"] == "timeout"
    await decode.until(lambda: decode.seen[0].cancelled)
    await prefill.until(lambda: prefill.seen[0].cancelled)


async def test_time_that_ends_as_the_answer_begins_is_an_error(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = await lab.proxy([], [await lab.server()])
    perform = ClientExchange._perform

    async def perform_and_stop(self: ClientExchange, action: ProxyAction) -> None:
        await perform(self, action)
        if isinstance(action, Relay):
            self.stop(TIMED_OUT)

    monkeypatch.setattr(ClientExchange, "_perform", perform_and_stop)
    status, body = await proxy.post({"prompt": "x", "stream": True})
    assert status == 504 and json.loads(body)["error"]["type"] == "timeout"
    await proxy.idle()


async def test_requests_go_to_the_server_with_the_least_of_them(lab: Lab) -> None:
    slow, fast = await lab.server(hold=True), await lab.server()
    proxy = await lab.proxy([], [slow, fast])
    asking = asyncio.create_task(proxy.post({"prompt": "x"}))
    await slow.until(lambda: len(slow.seen) == 1)
    for _ in range(4):
        assert (await proxy.post({"prompt": "x"}))[0] == 200
    assert (len(slow.seen), len(fast.seen)) == (1, 4)
    slow.release()
    await asking


# ---- health, models, metrics


async def test_health_names_faults_and_recovered_servers_serve(lab: Lab) -> None:
    decode = await lab.server(healthy=False)
    proxy = await lab.proxy([], [decode])
    status, body = await proxy.get("/health")
    state = json.loads(body)
    assert status == 503 and state["servers"][0]["reason"] == "/health answered 503"
    status, body = await proxy.post({"prompt": "x"})
    assert status == 503 and "no decode server is healthy" in json.loads(body)["error"]["message"]
    assert (await proxy.get("/v1/models"))[0] == 503
    decode.healthy = True

    async def is_healthy() -> bool:
        return (await proxy.get("/health"))[0] == 200

    await eventually_async(is_healthy, "a healthy proxy")
    assert (await proxy.post({"prompt": "x"}))[0] == 200
    assert json.loads((await proxy.get("/v1/models"))[1])["data"][0]["port"] == decode.port


async def test_models_come_from_the_first_decode_server_that_answers(lab: Lab) -> None:
    failing, other = await lab.server(status=500), await lab.server()
    proxy = await lab.proxy([], [failing, other])
    for _ in range(2):
        assert json.loads((await proxy.get("/v1/models"))[1])["data"][0]["port"] == other.port
    other.status = 500
    assert (await proxy.get("/v1/models"))[0] == 502


async def test_metrics_count_requests_hand_offs_and_failures(lab: Lab) -> None:
    prefill, decode = await lab.server(), await lab.server()
    proxy = await lab.proxy([prefill], [decode])
    await proxy.post({"prompt": LONG})
    await proxy.post({"prompt": "short"})
    prefill.status = 500
    await proxy.post({"prompt": LONG})
    text = (await proxy.get("/metrics"))[1].decode()
    for line in (
        'kvservice_proxy_requests_total{path="/v1/completions",status="200"} 3.0',
        f'kvservice_proxy_sent_total{{handoff="yes",role="prefill",server="{prefill.url}"}} 2.0',
        f'kvservice_proxy_failures_total{{fault="error",role="prefill",server="{prefill.url}"}} 1.0',
        f'kvservice_proxy_server_healthy{{role="decode",server="{decode.url}"}} 1.0',
        f'kvservice_proxy_server_in_flight{{role="decode",server="{decode.url}"}} 0.0',
    ):
        assert line in text


async def test_a_server_that_hangs_is_left_for_another(lab: Lab) -> None:
    """It is left before it breaks any connection."""
    hanging, other = await lab.server(hold=True), await lab.server(hold=True)
    proxy = await lab.proxy([], [hanging, other])
    asking = asyncio.create_task(proxy.post({"prompt": "x"}))
    await hanging.until(lambda: len(hanging.seen) == 1)
    hanging.healthy = False
    await hanging.until(lambda: hanging.seen[0].cancelled)
    await other.until(lambda: len(other.seen) == 1)
    other.release()
    assert (await asking)[0] == 200


async def test_a_failed_server_is_checked_before_it_is_due(lab: Lab) -> None:
    decode = await lab.server(die_after=0)
    proxy = await lab.proxy([], [decode], check_seconds=60)
    assert (await proxy.post({"prompt": "x"}))[0] == 502
    decode.die_after = None
    await eventually_async(lambda: proxy.proxy.pool.healthy(Role.DECODE), "a healthy decode server", 20)
    assert (await proxy.post({"prompt": "x"}))[0] == 200


async def test_a_stream_that_has_begun_is_not_broken_by_a_health_check(lab: Lab) -> None:
    decode = await lab.server(tokens=("tick",) * 60)
    proxy = await lab.proxy([], [decode], check_seconds=0.05)
    async with proxy.session.post(proxy.url + COMPLETIONS, json={"prompt": "x", "stream": True}) as response:
        await response.content.readline()
        decode.healthy = False
        await eventually_async(lambda: not proxy.proxy.pool.healthy(Role.DECODE), "the failed health check")
        rest = await response.read()
    assert b"error" not in rest and rest.endswith(b"data: [DONE]\n\n")


# ---- everything at once


async def disturb(lab: Lab, server: FakeServer, chance: random.Random) -> FakeServer:
    """One thing that can happen to a prefill server; the one that stands in its place after it."""
    kind = chance.choice(["dies", "errors", "busy", "hangs", "moves", "plain", "well"])
    server.status = {"errors": 500, "busy": 429}.get(kind, 200)
    server.node = {"moves": f"node-{chance.random()}", "plain": None}.get(kind, "node-a")
    server.hold = kind == "hangs"
    server.release()
    if kind == "dies":
        await server.stop()
        await asyncio.sleep(chance.random() / 20)
        return await lab.server(port=server.port)
    return server


async def test_clients_see_nothing_of_failing_prefill_servers(lab: Lab) -> None:
    chance = random.Random(7)
    prefill, decode = [await lab.server(), await lab.server()], [await lab.server(), await lab.server()]
    proxy = await lab.proxy(prefill, decode, check_seconds=0.05, prefill_seconds=0.1)
    ends_at = time.monotonic() + 2

    async def client(stream: bool) -> int:
        count = 0
        while time.monotonic() < ends_at or count < 4:  # a slow machine does few in two seconds
            status, body = await proxy.post({"prompt": LONG, "stream": stream})
            assert status == 200, body
            good = body == b"".join(decode[0].events(COMPLETIONS)) if stream else json.loads(body)["choices"]
            assert good, body
            count += 1
        return count

    clients = [asyncio.create_task(client(index % 2 == 0)) for index in range(6)]
    while not all(each.done() for each in clients):
        index = chance.randrange(2)
        prefill[index] = await disturb(lab, prefill[index], chance)
        await asyncio.sleep(chance.random() / 20)
    assert sum([await each for each in clients]) >= 24
    await proxy.idle()
    alone = [seen.params is None for server in decode for seen in server.seen]
    assert any(alone) and not all(alone)  # both kinds were met


# ---- its end


async def test_at_its_end_it_finishes_old_work_and_refuses_new(lab: Lab) -> None:
    """What does not end in time is broken off."""
    ending, endless = await lab.server(hold=True), await lab.server(tokens=("tick",) * 5000)
    proxy = await lab.proxy([], [ending, endless], grace_seconds=0.3)
    finishing = asyncio.create_task(proxy.post({"prompt": "x"}))
    await ending.until(lambda: len(ending.seen) == 1)
    streaming = asyncio.create_task(proxy.post({"prompt": "x", "stream": True}))
    await endless.until(lambda: len(endless.seen) == 1)
    stopping = asyncio.create_task(proxy.proxy.stop())
    await asyncio.sleep(0.05)
    with pytest.raises(aiohttp.ClientConnectorError):
        await proxy.post({"prompt": "x"})
    ending.release()
    assert (await finishing)[0] == 200
    _, body = await streaming
    await stopping
    assert b"this proxy is stopping" in body and body.endswith(b"data: [DONE]\n\n")
    await endless.until(lambda: endless.seen[0].cancelled)
