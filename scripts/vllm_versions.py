"""`python -m scripts.vllm_versions FOLDER`: what the vLLM whose files lie in this folder changes for the connector.

Says one line, beside the installed vLLM: base classes and their methods, names that kvservice imports, and settings
that nobody has decided about. Exits with 1 if something that kvservice uses went or changed. Reads source text; nothing
of vLLM is imported, so a version without a build for this machine will do.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvservice.connector.vllm import identity_tables as tables

ROOT = Path(__file__).parent.parent
OURS = ("kvservice/connector/vllm", "kvservice/connector/offloading")
V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
# Base class → (its file, our class below it and where that is).
BASES = {
    "KVConnectorBase_V1": (f"{V1}/base.py", "KVServiceConnector", "kvservice/connector/vllm/connector.py"),
    "KVConnectorStats": (f"{V1}/metrics.py", "ConnectorStats", "kvservice/connector/vllm/stats.py"),
    "KVConnectorPromMetrics": (f"{V1}/metrics.py", "ConnectorPromMetrics", "kvservice/connector/vllm/stats.py"),
    "SecondaryTierManager": (
        "vllm/v1/kv_offload/tiering/base.py",
        "KVServiceTier",
        "kvservice/connector/offloading/tier.py",
    ),
}


@dataclass(frozen=True, slots=True)
class SourceTree:
    """The files of one version. `site` holds the folder vllm."""

    site: Path

    def parsed(self, file: str) -> ast.Module | None:
        path = self.site / file
        return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None

    def methods(self, file: str, name: str) -> dict[str, str]:
        """Method → its parameters, with `abstract ` before them if it has to be written. Empty if the class went."""
        tree = self.parsed(file)
        found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name] if tree else []
        return {
            node.name: ("abstract " if "abstractmethod" in map(ast.unparse, node.decorator_list) else "")
            + ", ".join(arg.arg for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
            for each in found
            for node in each.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    def has(self, module: str, name: str) -> bool:
        """Whether `from module import name` would work, as far as the text says."""
        path = module.replace(".", "/")
        if (self.site / path / f"{name}.py").is_file() or (self.site / path / name).is_dir():
            return True
        tree = self.parsed(f"{path}.py") or self.parsed(f"{path}/__init__.py")
        return tree is not None and (name in set(_defined(tree)) or f'"{name}"' in ast.unparse(tree).replace("'", '"'))

    def fields(self, name: str) -> set[str]:
        """The settings of one class of vLLM's configuration."""
        for path in sorted((self.site / "vllm" / "config").glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return {
                        item.target.id
                        for item in node.body
                        if isinstance(item, ast.AnnAssign)
                        and isinstance(item.target, ast.Name)
                        and not re.search(r"ClassVar|InitVar", ast.unparse(item.annotation))
                    }
        return set()

    def variables(self) -> set[str]:
        """The environment variables that vLLM knows."""
        tree = self.parsed("vllm/envs.py")
        keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys] if tree else []
        texts = {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
        return {text for text in texts if re.fullmatch(r"[A-Z][A-Z0-9_]+", text)}


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)


def imports() -> set[tuple[str, str]]:
    """(module of vLLM, name) of everything that the connector and the tier import."""
    return {
        (node.module, alias.name)
        for folder in OURS
        for path in sorted((ROOT / folder).glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }


SECTIONS = {
    "model_config": "ModelConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "load_config": "LoadConfig",
    "attention_config": "AttentionConfig",
    "kernel_config": "KernelConfig",
    "mamba_config": "MambaConfig",
    "lora_config": "LoRAConfig",
}


def undecided(tree: SourceTree) -> list[str]:
    """Settings in no table of identity_tables. They are hashed, so engines that differ in them share nothing."""
    known = {*tables.SECTIONS_LEFT_OUT, *tables.SECTIONS_HASHED}
    found = sorted(tree.fields("VllmConfig") - known)
    for section, name in SECTIONS.items():
        decided = {*tables.LEFT_OUT.get(section, {}), *tables.HASHED[section]}
        found += [f"{section}.{field}" for field in sorted(tree.fields(name) - decided) if not field.startswith("_")]
    for variable in sorted(tree.variables()):
        if not re.fullmatch(tables.ENVIRONMENT_HASHED, variable) and not any(
            re.fullmatch(pattern, variable) for pattern in tables.ENVIRONMENT_LEFT_OUT
        ):
            found.append(variable)
    return found


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a new version, for the connector."""

    new: list[str]  # hooks that it offers and kvservice does not use
    broken: list[str]  # what kvservice uses, and is gone or otherwise
    undecided: list[str]

    @property
    def fits(self) -> bool:
        return not self.broken and not self.undecided

    def line(self, version: str) -> str:
        parts = [f"vLLM {version}: {'fits' if self.fits else 'does not fit'}"]
        for what, names in (("new", self.new), ("gone or changed", self.broken), ("undecided", self.undecided)):
            if names:
                parts.append(f"{what}: {', '.join(names)}")
        return "; ".join(parts)


def compare(known: SourceTree, other: SourceTree) -> Difference:
    """`known` is the vLLM that the tests start engines of."""
    new, broken = [], []
    for base, (file, ours, where) in BASES.items():
        before, after = known.methods(file, base), other.methods(file, base)
        used = SourceTree(ROOT).methods(where, ours)
        if not after:
            broken.append(f"{base} is not in {file}")
            continue
        new += [f"{base}.{name}" for name in after.keys() - before.keys() if not after[name].startswith("abstract")]
        broken += [
            f"{base}.{name} has to be written"
            for name in after
            if after[name].startswith("abstract") and name not in used
        ]
        broken += [f"{base}.{name} is gone" for name in before.keys() - after.keys() if name in used]
        broken += [
            f"{base}.{name}({after[name].removeprefix('abstract ')})"
            for name in before.keys() & after.keys() & used.keys()
            if before[name].removeprefix("abstract ") != after[name].removeprefix("abstract ")
        ]
    broken += [f"{module}.{name}" for module, name in imports() if not other.has(module, name)]
    return Difference(sorted(new), sorted(broken), undecided(other))


def installed() -> SourceTree:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "run `make install`"
    return SourceTree(Path(spec.origin).parent.parent)


def version_of(site: Path) -> str:
    found = sorted(site.glob("vllm-*.dist-info"))
    return found[0].name.removeprefix("vllm-").removesuffix(".dist-info").removesuffix("+cpu") if found else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description="What a version of vLLM changes for kvservice's connector.")
    parser.add_argument("folder", type=Path, help="with the folder vllm of that version in it")
    options = parser.parse_args()
    if not (options.folder / "vllm").is_dir():
        parser.error(f"{options.folder} has no folder vllm: run `make vllm-versions`")
    found = compare(installed(), SourceTree(options.folder))
    print(found.line(version_of(options.folder)))
    return 0 if found.fits else 1


if __name__ == "__main__":
    sys.exit(main())
