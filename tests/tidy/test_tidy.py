"""The source tree keeps its own rules, and each rule bites when it is broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tidy import rules
from tests.tidy.limits import limits
from tests.tidy.rules import FILE_LINES_MAX, FUNCTION_LINES_MAX, SOURCE_FOLDERS, TEST_NAME_CHARS_MAX
from tests.tidy.words import ALLOWED, type_names, words

ROOT = Path(__file__).resolve().parents[2]
RULES = {**rules.RULES, "words": words, "type_names": type_names, "limits": limits}
LONG_NAME = f"def test_{0:0{TEST_NAME_CHARS_MAX}}():\n    assert 1\n"
LONG_FUNCTION = "def long() -> None:\n" + "    pass\n" * FUNCTION_LINES_MAX


@pytest.mark.parametrize("name", RULES)
def test_the_tree_keeps_the_rule(name: str) -> None:
    findings = RULES[name](ROOT)
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize(("package", "most"), [("core", 12), ("connector", 8)])
def test_what_lies_at_the_root_of_a_package_is_little(package: str, most: int) -> None:
    """It is the vocabulary; everything else has a room."""
    files = [path.name for path in (ROOT / "kvservice" / package).glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= most, sorted(files)


@pytest.fixture(scope="module")
def clean_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tree that keeps every rule; faults are planted in copies of it."""
    root = tmp_path_factory.mktemp("tree")
    for folder in (*SOURCE_FOLDERS, "kvservice/core", "kvservice/cli", "kvservice/connector", "kvservice/transfer"):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "__init__.py").write_text("")
    (root / "kvservice/actors").symlink_to("../actors")
    (root / "kvservice/wire/v1").mkdir(parents=True)
    (root / "kvservice/wire/v1/common_pb2.py").write_text(LONG_FUNCTION + "x = 1\n" * FILE_LINES_MAX)
    (root / "kvservice/core/messages.py").write_text(
        "from kvservice.errors import InvalidRequest\nimport xxhash\n\nclass Known: ...\n"
        "PEERS_MAX = 16  # one a node\n# The names of the layouts.\nLAYOUTS = 2\nSTRICT = True\n"
    )
    (root / "README.md").write_text(
        "A whole family of models is within reach on either side. The mirror is a directory.\n"
    )
    (root / "kvservice/transfer/nixl.py").write_text("def load():\n    import nixl_cu12._api\n")
    (root / "kvservice/cli/main.py").write_text("import typer\n\ndef up():\n    from kvservice.actors import deploy\n")
    (root / "actors/shard.py").write_text("import ray\nfrom kvservice.shard import server\nfrom . import names\n")
    (root / "tests/test_one.py").write_text("def test_one():\n    assert 1 == 1\n")
    return root


def test_a_tree_without_faults_has_no_findings(clean_copy: Path) -> None:
    assert {name: rule(clean_copy) for name, rule in RULES.items()} == {name: [] for name in RULES}


FAULTS = [
    ("layering", "kvservice/core/shard.py", "from kvservice.wire import codec\n"),
    ("layering", "kvservice/core/shard.py", "from kvservice import memory\n"),
    ("layering", "kvservice/core/shard.py", "from ..memory import segment\n"),
    ("layering", "kvservice/connector/plan.py", "def f():\n    import kvservice.actors.deploy\n"),
    ("layering", "actors/x.py", "from kvservice.connector import vllm\n"),
    ("layering", "kvservice/transfer/x.py", "from kvservice.testing import fakes\n"),
    ("layering", "kvservice/newcomer/x.py", ""),
    ("rooms", "kvservice/core/store/x.py", "from kvservice.core.acquire import acquisitions\n"),
    ("rooms", "kvservice/core/block/x.py", "from kvservice.core import messages\n"),
    ("rooms", "kvservice/core/drain/x.py", "from ..shard import ShardState\n"),
    ("rooms", "kvservice/connector/scheduler/x.py", "def f():\n    import kvservice.connector.worker.half\n"),
    ("rooms", "kvservice/core/newcomer.py", ""),
    ("no_circles", "actors/deploy.py", "def f():\n    from kvservice.cli import main\n"),
    ("lazy_cli", "kvservice/cli/x.py", "from kvservice.client import shard\n"),
    ("third_party_homes", "kvservice/core/shard.py", "import vllm\n"),
    ("third_party_homes", "kvservice/connector/worker/x.py", "import vllm\n"),
    ("third_party_homes", "kvservice/connector/vllm/x.py", "from lmcache.v1 import config\n"),
    ("third_party_homes", "kvservice/connector/plan.py", "def f():\n    import ray\n"),
    ("third_party_homes", "actors/x.py", "from vllm.config import VllmConfig\n"),
    ("third_party_homes", "kvservice/connector/plan.py", "import grpc.aio\n"),
    ("third_party_homes", "kvservice/connector/plan.py", "from google.protobuf import message\n"),
    ("third_party_homes", "kvservice/connector/plan.py", 'import importlib\nimportlib.import_module("nixl._api")\n'),
    ("third_party_homes", "kvservice/transfer/second.py", "import nixl\n"),
    ("core_purity", "kvservice/core/shard.py", "import time\n"),
    ("core_purity", "kvservice/core/shard.py", "from random import Random\n"),
    ("core_purity", "kvservice/engine/blocks.py", "import torch\n"),
    ("core_purity", "kvservice/core/shard.py", "def f():\n    import asyncio\n"),
    ("core_purity", "kvservice/core/shard.py", "async def f(): ...\n"),
    ("core_purity", "kvservice/core/shard.py", "def f():\n    print(1)\n"),
    ("no_pickle", "kvservice/core/shard.py", "import pickle\n"),
    ("no_pickle", "actors/x.py", "from cloudpickle import dumps\n"),
    ("no_pickle", "examples/x.py", "import torch\ntorch.load('x')\n"),
    ("no_pickle", "benchmarks/x.py", "import numpy\nnumpy.load('x', allow_pickle=True)\n"),
    ("sizes", "kvservice/core/shard.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
    ("sizes", "tests/test_x.py", LONG_FUNCTION),
    (
        "kept_cancellations",
        "kvservice/client/x.py",
        "import asyncio\nasync def f(e):\n    await asyncio.wait_for(e, 1)\n",
    ),
    ("kept_cancellations", "actors/x.py", "from asyncio import wait_for\n"),
    ("handlers_without_locks", "kvservice/x.py", "signal.signal(15, lambda *_: stopped.set())\n"),
    ("handlers_without_locks", "benchmarks/x.py", "signal.signal(15, stopped.set)\n"),
    ("kept_cancellations", "kvservice/x.py", "async def f(t):\n    t.cancel()\n    await asyncio.gather(t)\n"),
    ("no_drawers", "kvservice/core/utils.py", ""),
    ("no_drawers", "actors/helpers.py", ""),
    ("no_drawers", "kvservice/common/x.py", ""),
    ("formatter_decides", "kvservice/x.py", "x = 1  # fmt: skip\n"),
    ("formatter_decides", "kvservice/x.py", "\n# fmt: off\nx = {1:  2}\n# fmt: on\n"),
    ("tests_that_check", "tests/test_x.py", "def test_x():\n    print('fine')\n"),
    ("words", "kvservice/core/shard.py", "class GhostTable: ...\n"),
    ("words", "kvservice/core/shard.py", "def f(side_count): ...\n"),
    ("words", "kvservice/core/shard.py", "def f(request):\n    request.passedOver = True\n"),
    ("words", "kvservice/core/shard.py", "# The governor decides.\n"),
    ("words", "kvservice/core/shard.py", 'COUNTERS = {"evicted_originals": 0}\n'),
    ("words", "kvservice/core/move_worker.py", ""),
    ("words", "kvservice/cli/x.py", 'OPTION = "--gpu-workers"\n'),
    ("words", "tests/test_x.py", "def test_a_verdict_is_told():\n    assert 1\n"),
    ("words", "protos/x.proto", "message M { repeated uint32 sides = 1; }  // fine\n"),
    ("words", "helm/values.yaml", "mover: true\n"),
    ("words", "docs/x.md", "See `kvservice_evicted_originals_total`.\n"),
    ("words", "helm/dashboard.json", '{"expr": "rate(kvservice_evicted_originals_total[5m])"}\n'),
    ("words", "docs/x.md", "Each lookup shard holds a part.\n"),
    ("type_names", "kvservice/cli/x.py", "class Known: ...\n"),
    ("limits", "kvservice/core/newcomer.py", "WAIT_SECONDS_MAX = 30.0\n"),
    ("limits", "kvservice/cli/x.py", "WAIT_MIN, WAIT_MAX = 1, 1 << 3\n"),
    ("limits", "actors/x.py", "_PEERS_MAX: int = -(1 << 10)  # noqa: E501\n"),
    ("names_of_tests", "tests/test_x.py", LONG_NAME),
    ("tests_mirror_the_product", "tests/unit/newcomer/test_x.py", "assert 1\n"),
    ("tests_mirror_the_product", "tests/unit/test_x.py", "assert 1\n"),
    (
        "one_wait",
        "tests/test_x.py",
        "import time\nassert 1\nwhile time.monotonic() < 5:\n    time.sleep(0.1)\n",
    ),
]


@pytest.mark.parametrize(("rule", "path", "text"), FAULTS)
def test_a_planted_fault_is_found(clean_copy: Path, tmp_path: Path, rule: str, path: str, text: str) -> None:
    root = tmp_path / "tree"
    shutil.copytree(clean_copy, root, symlinks=True)
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    findings = RULES[rule](root)
    assert findings
    assert path in "\n".join(findings)


def test_an_actors_folder_that_is_no_link_is_found(clean_copy: Path, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    shutil.copytree(clean_copy, root)
    assert RULES["actors_link"](root)
    shutil.rmtree(root / "kvservice/actors")
    (root / "kvservice/actors").symlink_to(root / "actors")
    assert "not ../actors" in RULES["actors_link"](root)[0]


def test_every_rule_has_a_planted_fault() -> None:
    assert {rule for rule, _, _ in FAULTS} | {"actors_link"} == set(RULES)


def test_every_exception_to_the_words_is_still_needed() -> None:
    findings = words(ROOT, allowed=())
    unneeded = [
        (word, place)
        for word, place in ALLOWED
        if not any(finding.startswith(place) and f"{word!r}: say" in finding for finding in findings)
    ]
    assert not unneeded
