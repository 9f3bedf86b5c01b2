"""A workload of conversations: many users, one system prompt, several turns each, through the OpenAI API.

The same for every app it is played to: texts and order come from a seed. A user's next turn contains what the model
answered before. Runs on an event loop of the caller's.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

SYSTEM_CHARS = 1300
FIRST_CHARS = 1500
NEXT_CHARS = 500
ANSWER_TOKENS = 12
REQUEST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    users: int = 10
    turns: int = 6
    at_once: int = 1  # requests in flight: two small engines keep two cores busy with one
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered request. Tokens are those of its prompt, as the server counted them."""

    user: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    seconds: float

    @property
    def recomputed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


async def play(base_url: str, model: str, document: str, shape: Shape) -> list[Turn]:
    """Turn by turn all users in a shuffled order, so that all others come between two turns of one. Raises
    openai.APIError when a request fails."""
    from openai import AsyncOpenAI

    order = random.Random(shape.seed)
    room = asyncio.Semaphore(shape.at_once)
    talks = [[{"role": "system", "content": document[:SYSTEM_CHARS]}] for _ in range(shape.users)]
    found: list[Turn] = []
    async with AsyncOpenAI(base_url=base_url, api_key="none", timeout=REQUEST_SECONDS, max_retries=0) as client:

        async def take(user: int, turn: int) -> None:
            async with room:
                talks[user].append({"role": "user", "content": _question(document, user, turn)})
                answered, text = await _ask(client, model, talks[user], user, turn)
                talks[user].append({"role": "assistant", "content": text})
                found.append(answered)

        for turn in range(shape.turns):
            users = list(range(shape.users))
            order.shuffle(users)
            await asyncio.gather(*[take(user, turn) for user in users])
    return found


async def warm(base_url: str, model: str, count: int) -> None:
    """Send the first requests, which are slow because engine and router load parts of themselves lazily."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key="none", timeout=REQUEST_SECONDS) as client:
        for number in range(count):
            talk = [{"role": "user", "content": f"{number} " * 40}]
            await _ask(client, model, talk, 0, 0)


def _question(document: str, user: int, turn: int) -> str:
    """A passage of the document that only this user asks about."""
    size = FIRST_CHARS if turn == 0 else NEXT_CHARS
    start = (SYSTEM_CHARS + user * 1733 + turn * 4099) % max(len(document) - size, 1)
    return f"Visitor {user}, question {turn}. What does this passage say?\n\n{document[start : start + size]}"


async def _ask(client: Any, model: str, talk: list[dict[str, str]], user: int, turn: int) -> tuple[Turn, str]:
    started, first = time.perf_counter(), 0.0
    words: list[str] = []
    usage: Any = None
    stream = await client.chat.completions.create(
        model=model,
        messages=talk,
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - started
            words.append(chunk.choices[0].delta.content)
        usage = chunk.usage or usage
    details = usage.prompt_tokens_details
    cached = 0 if details is None or details.cached_tokens is None else details.cached_tokens
    seconds = time.perf_counter() - started
    return Turn(user, turn, usage.prompt_tokens, cached, first or seconds, seconds), "".join(words)
