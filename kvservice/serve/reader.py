"""Turns prompts into tokens and block keys, off the event loop: one thread per tokenizer, shared by its routers.

A fast tokenizer must not be used by two threads at once, and needs seconds to load. It is loaded in that thread, and
until then no prompt is known. A bounded number of prompts wait for the thread; further ones are refused at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvservice.core.block.keys import block_keys
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.messages import EngineKind
from kvservice.errors import KVServiceError
from kvservice.serve.options import RouterOptions
from kvservice.serve.prompt import PromptTokenizer, Question, Unknown
from kvservice.units import BlockHash, BlockKey

log = logging.getLogger("kvservice.serve")

# Prompts that wait for the thread. At a few milliseconds each, later ones would miss the budget anyway; they are routed
# by load.
JOBS_MAX = 64
REFUSED_MAX = 64  # Errors that were logged and are not logged again. There is about one per fingerprint.
# The fields of a fingerprint that say how an engine names the blocks of a prompt.
NAMING = ("hash", "hash_seed", "block_tokens", "slot_tokens", "hash_python", "draft_layers")
RETRY_SECONDS = 30.0  # Until a tokenizer that could not be loaded is tried again: a hub may be back by then.


@dataclass(frozen=True, slots=True)
class Named:
    """A prompt under the names that the engines give it, by the digest of their fingerprint."""

    tokens: int
    hashes: Mapping[bytes, list[BlockHash]]
    keys: Mapping[bytes, list[BlockKey]]


class PromptReader:
    """Tokenises prompts. Call `read` and `wake` on event loops; the rest runs in the reader's thread."""

    _readers: dict[tuple[object, ...], PromptReader] = {}
    _lock = threading.Lock()

    def __init__(self, options: RouterOptions) -> None:
        self._tokenizer = PromptTokenizer(
            options.tokenizer,
            tokens_max=options.tokens_max,
            chat_template=options.chat_template,
            template_arguments=options.chat_template_kwargs,
            content_format=options.content_format,
            trust_remote_code=options.trust_remote_code,
        )
        self._named = bool(options.tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvservice-prompts")
        self._jobs = 0
        self._guard = threading.Lock()
        self._loading: Future[None] | None = None
        self._load_again_at = 0.0
        self._loaded = False
        self._refused: BoundedTable[str, None] = BoundedTable(REFUSED_MAX)  # the errors that were logged

    @classmethod
    def shared(cls, options: RouterOptions) -> PromptReader:
        """The process's reader for these options. Loads nothing before `wake`."""
        arguments = tuple(sorted((key, repr(value)) for key, value in options.chat_template_kwargs.items()))
        name = (
            options.tokenizer,
            options.chat_template,
            arguments,
            options.content_format,
            options.trust_remote_code,
            options.tokens_max,
        )
        with cls._lock:
            if name not in cls._readers:
                cls._readers[name] = PromptReader(options)
            return cls._readers[name]

    def wake(self) -> None:
        """Start to load the tokenizer if that is needed. Returns at once."""
        with self._guard:
            busy = self._loading is not None and not self._loading.done()
            if self._loaded or busy or time.monotonic() < self._load_again_at:
                return
            self._load_again_at = time.monotonic() + RETRY_SECONDS
            self._loading = self._thread.submit(self._load)

    async def read(self, question: Question, engines: Mapping[bytes, EngineKind]) -> Named:
        """Tokens and block keys of a prompt. Raises Unknown, at once if too many prompts wait."""
        if question.token_ids is None and not self._named:
            raise Unknown("no_tokenizer")
        if not self._loaded:
            raise Unknown("tokenizer_loading")
        with self._guard:
            if self._jobs >= JOBS_MAX:
                raise Unknown("busy")
            self._jobs += 1
        job = self._thread.submit(self._read, question, dict(engines))
        job.add_done_callback(self._job_done)
        return await asyncio.wrap_future(job)

    def _job_done(self, job: Future[Named]) -> None:
        with self._guard:
            self._jobs -= 1

    def _load(self) -> None:
        try:
            import kvservice.connector.vllm.block_hashes  # noqa: F401  vLLM takes a while, too

            if self._named:
                self._tokenizer.load()
            self._loaded = True
        except Exception as error:  # noqa: BLE001  thread boundary: libraries raise anything here; it is tried again
            log.error("the router cannot look prompts up, because its tokenizer could not be loaded: %s", error)

    def _read(self, question: Question, engines: Mapping[bytes, EngineKind]) -> Named:
        from kvservice.connector.vllm.block_hashes import block_namer

        tokens = self._tokenizer.tokens(question)
        hashes: dict[bytes, list[BlockHash]] = {}
        keys: dict[bytes, list[BlockKey]] = {}
        done: dict[tuple[str, ...], list[BlockHash]] = {}
        for digest, kind in engines.items():
            fields = dict(kind.fingerprint.fields)
            naming = tuple(fields.get(name, "") for name in NAMING)
            if naming not in done:
                try:
                    done[naming] = block_namer(fields, question.cache_salt)(tokens.ids)
                except KVServiceError as error:
                    self._refuse(error)
                    raise Unknown("hash_unknown") from error
            hashes[digest] = done[naming]
            keys[digest] = block_keys(digest, done[naming], kind.tenant_key)
        return Named(tokens.count, hashes, keys)

    def _refuse(self, error: KVServiceError) -> None:
        if error.message not in self._refused:  # log it once, not for every request
            self._refused.put(error.message, None)
            log.error("the router cannot look prompts up: %s", error.message)
