"""Stands where torchvision is not installed: whatever is imported from it is there, and is an empty class.

vLLM's file of Qwen3.5 imports what prepares pictures, also for a model of text, which uses nothing of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__path__: list[str] = []  # it has modules
__version__ = "0.28.0"  # one that goes with torch 2.13


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


class _Empty(type):
    def __getattr__(cls, name: str) -> Any:
        return __getattr__(name)


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("torchvision."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = __getattr__  # type: ignore[method-assign]


sys.meta_path.append(_Modules())
