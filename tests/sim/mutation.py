"""Plants a fault in loaded production code: the source is changed, compiled anew, and the functions that differ get the
new code. Classes, globals and everybody's references stay the same objects."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str  # the rule that is broken
    module: str
    old: str  # must occur exactly once in the module's source
    new: str
    seed: int = 0  # of a schedule that finds it
    also: tuple[tuple[str, str, str], ...] = ()  # (module, old, new): what would catch the fault before it does harm


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Raises LookupError when the place is not there any more: then the mutant has to be written anew."""
    undo: list[tuple[FunctionType, CodeType]] = []
    try:
        for module_name, old, new in ((mutant.module, mutant.old, mutant.new), *mutant.also):
            undo += _plant(mutant.name, importlib.import_module(module_name), old, new)
        yield
    finally:
        for function, code in reversed(undo):
            function.__code__ = code


def _plant(name: str, module: ModuleType, old: str, new: str) -> list[tuple[FunctionType, CodeType]]:
    source = inspect.getsource(module)
    if source.count(old) != 1:
        raise LookupError(f"{name}: {source.count(old)} places in {module.__name__} read {old!r}")
    changed = _codes(compile(source.replace(old, new), f"<{name}>", "exec"))
    done: list[tuple[FunctionType, CodeType]] = []
    for function in _functions(module):
        code = changed.get(function.__qualname__)
        if code is not None and _text(code) != _text(function.__code__):
            done.append((function, function.__code__))
            function.__code__ = code
    if not done:
        raise LookupError(f"{name}: nothing changed in {module.__name__}")
    return done


def _codes(code: CodeType) -> dict[str, CodeType]:
    found: dict[str, CodeType] = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found[constant.co_qualname] = constant
            found.update(_codes(constant))
    return found


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for thing in vars(module).values():
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        if isinstance(thing, FunctionType):
            yield thing
        elif isinstance(thing, type):
            for member in vars(thing).values():
                function = getattr(member, "__func__", member)
                function = getattr(function, "fget", function)
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    yield function


def _text(code: CodeType) -> object:
    """What the code does, without where it stands."""
    constants = tuple(_text(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames
