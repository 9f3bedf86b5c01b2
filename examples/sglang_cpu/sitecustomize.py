"""Lets SGLang's HiCache run on a machine without a GPU: for the demo and the tests, with this folder in PYTHONPATH.

SGLang's wheel is for GPUs. Python imports this file in each process, also in those that SGLang spawns. It changes three
things, and only when SGLang is imported:

- IPython and torchvision, which SGLang imports and a text model does not call, are stand-ins where they are missing.
- Two kernels that copy pages between the KV cache and host memory are written with torch, and host memory is not
  registered with CUDA.
- SGLang keeps 10 GiB of host memory free, which a small machine does not have.

Nothing else of SGLang is changed: its scheduler, its radix tree, its HiCache and its model run as they are.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

STAND_INS = ("IPython", "torchvision")


class Anything:
    """Each attribute of it, and what calling it gives, is another such thing."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *arguments: Any, **named: Any) -> Anything:
        return Anything()


class StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


# The names of their arguments are SGLang's. Places come in whole pages, so the first of each page says where it is.
def copy_pages_to_host(
    *, src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """From the tensor of each layer, those of K and then those of V, to K and V of all pages, `[page][layer]…`."""
    layers = len(src_ptrs) // len(dst_ptrs)
    numbers = dst_indices[::page_size] // page_size
    for kind, pages in enumerate(dst_ptrs):
        for layer in range(layers):
            tokens = src_ptrs[kind * layers + layer][src_indices]
            pages[numbers, layer] = tokens.view(-1, page_size, *tokens.shape[1:])


def copy_layer_from_host(
    *,
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """From K and V of all pages to K and V of one layer."""
    numbers = src_indices[::page_size] // page_size
    for pages, tokens in zip(src_ptrs, dst_ptrs, strict=True):
        tokens[dst_indices] = pages[numbers, layer_id].flatten(0, 1)


def nothing(*arguments: Any, **named: Any) -> None:
    pass


# By module of SGLang: what stands in for its functions and numbers.
REPLACED: dict[str, dict[str, Any]] = {
    "sglang.srt.mem_cache.pool_host.base": {"HICACHE_HOST_MEMORY_RESERVE_BYTES": 0},
    "sglang.srt.mem_cache.pool_host.common": {
        "_cuda_host_register": nothing,
        "_cuda_host_unregister": nothing,
    },
    "sglang.srt.mem_cache.pool_host.mha": {
        "transfer_kv_all_layer_direct_lf_pf": copy_pages_to_host,
        "transfer_kv_per_layer_direct_pf_lf": copy_layer_from_host,
    },
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The first to be asked for modules of REPLACED, and the last for STAND_INS."""

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._is_first:
            return self._replacing(name) if name in REPLACED else None
        if name.split(".")[0] in STAND_INS and _is_asked_by_sglang():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def _replacing(self, name: str) -> importlib.machinery.ModuleSpec | None:
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_replace(module: types.ModuleType) -> None:
            run(module)
            for own, replacement in REPLACED[name].items():
                setattr(module, own, replacement)

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _is_asked_by_sglang() -> bool:
    """Whether SGLang's own code imports now. Others ask whether torchvision is there, and act on the answer."""
    frame = sys._getframe()  # noqa: SLF001  who asks is nowhere else
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("importlib") and name != __name__:
            return bool(name.startswith("sglang"))
        frame = frame.f_back  # type: ignore[assignment]
    return False


sys.meta_path.insert(0, Finder(is_first=True))
sys.meta_path.append(Finder(is_first=False))
