"""HiCacheKVService: the class that SGLang's HiCache talks to. It decides nothing: see `storage`.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-mem-layout page_first_direct
    --hicache-io-backend direct --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvservice", "module_path": "kvservice.connector.sglang", "class_name": "HiCacheKVService",
    "interface_v1": 1, "hicache_storage_pass_prefix_keys": true}'

Only a wrong option at the start raises into the engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)

from kvservice.connector.options import Share
from kvservice.connector.sglang import identity
from kvservice.connector.sglang.clears import ClearTerms, agreed_name
from kvservice.connector.sglang.options import INTERFACE, SGLangOptions
from kvservice.connector.sglang.pages import Ranks
from kvservice.connector.sglang.storage import ALL_LAYERS, KV, Identity, PageStorage, PageTransfer
from kvservice.errors import ConfigError, KVServiceError
from kvservice.observe import logs

log = logging.getLogger("kvservice.connector")


class HiCacheKVService(HiCacheStorage):
    """One instance a rank. `_storage` is None if the engine's model or settings are not supported; then nothing is
    found and nothing is stored."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Reads the weights' files once, to name them. Raises ConfigError for wrong options, and for settings of
        SGLang that are refused."""
        logs.speak_through("sglang")
        identity.check_supported()  # before the options: in what is refused SGLang may hand over keys of its own
        options = SGLangOptions.parse(storage_config.extra_config or {})
        self._storage: PageStorage | None = None
        try:
            shares = options.share is Share.ENGINES
            found = _identity(storage_config, options, shares=shares)
            self._storage = PageStorage(options, found, clears=_clears())
        except ConfigError:
            raise
        except KVServiceError as error:
            log.error("serving without the cache: %s", error.message)

    # -- host pools ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is not None:
            self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        if self._storage is not None:
            self._storage.register(name, pool, torch.arange(pool.page_size))

    # -- the keys and values ----

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return 0 if self._storage is None else self._storage.find(_before(extra_info), keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        if self._storage is None:
            return [False] * len(keys)
        return self._storage.load(_before(extra_info), PageTransfer(KV, keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        if self._storage is None:
            return [False] * len(keys)
        return self._storage.store(_before(extra_info), PageTransfer(KV, keys, host_indices))

    # -- several pools ----

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        if self._storage is None:
            return PoolTransferResult.empty()
        found = self._storage.find_all(_before(extra_info), keys, [_wanted(each) for each in pool_transfers or ()])
        return PoolTransferResult(found.pages, found.by_pool, found.restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        if self._storage is None:
            return {each.name: [False] * len(each.keys or ()) for each in transfers}
        return {each.name: self._storage.load(_before(extra_info), _wanted(each)) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        if self._storage is None:
            return {each.name: [False] * len(each.keys or ()) for each in transfers}
        return {each.name: self._storage.store(_before(extra_info), _wanted(each)) for each in transfers}

    # -- metrics ----

    def get_stats(self) -> None:
        """SGLang calls it now and then if it runs with --enable-metrics. The counters go into its /metrics by
        themselves; its own numbers of pages and tokens it takes elsewhere."""
        for name, count in ({} if self._storage is None else self._storage.take_counts()).items():
            _events().labels(name).inc(count)

    # -- life ----

    def clear(self) -> None:
        if self._storage is not None:
            self._storage.clear()

    def close(self) -> None:
        if self._storage is not None:
            self._storage.close()

    # -- pages as tensors: only without "interface_v1", which the options refuse ----

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        raise NotImplementedError(INTERFACE)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        raise NotImplementedError(INTERFACE)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError(INTERFACE)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError(INTERFACE)

    def exists(self, key: str) -> bool:
        raise NotImplementedError(INTERFACE)


@functools.cache
def _events() -> Any:
    """The Prometheus counter of this process: a name can be registered once, and a storage may be attached again."""
    from prometheus_client import Counter  # not before SGLang has said where its processes gather them

    return Counter("sglang:kvservice_pages", "what became of pages at the pool", ["event"])


@functools.cache
def _clears() -> ClearTerms:
    """Those of this process, which is one rank of one engine."""
    return ClearTerms(agreed_name(), identity.weight_changes)


def _identity(config: HiCacheStorageConfig, options: SGLangOptions, *, shares: bool) -> Identity:
    layers = ALL_LAYERS if config.pp_size == 1 else f"stage {config.pp_rank} of {config.pp_size}"
    return Identity(
        model=identity.model_name(),
        fields={} if shares else identity.engine_fields(options),
        kv_heads=identity.kv_heads(),
        ranks=Ranks(config.tp_rank, config.tp_size, config.is_mla_model),
        layers=layers,
        source=identity.model_source() if shares else None,
    )


def _before(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str] | None:
    return None if extra_info is None else extra_info.prefix_keys


def _wanted(transfer: PoolTransfer) -> PageTransfer:
    return PageTransfer(str(transfer.name), transfer.keys or [], transfer.host_indices, transfer.hit_policy.value)
