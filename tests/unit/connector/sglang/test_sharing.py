"""Pages of SGLang for engines of other kinds: one order of bytes, one name, and nothing before the known prompt."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvservice.api.layout import Array
from kvservice.api.pool_thread import PoolThread
from kvservice.connector.sglang.options import SGLangOptions
from kvservice.connector.sglang.pages import Ranks, SharedPageForm
from kvservice.connector.sglang.sharing import KNOWN_PAGES, WAITS_FOR_PROMPT, ModelSource, form_of, shared_of
from kvservice.connector.sglang.storage import KV, Identity, PageStorage, PageTransfer
from kvservice.core.block.pages import KNOWN_PROMPT, PAGE_TOKENS, page_hashes
from kvservice.errors import ConfigError, UnsupportedLayout
from tests.unit.connector.sglang.host_memory import OPTIONS
from tests.unit.engine.tiny_models import make, prompt

HEADS, SIZE, LAYERS = 2, 16, 2  # of the small model
SHARE = {**OPTIONS, "share": "engines"}


class HostMemory:
    """MHA in the layout page_first_direct: `[K|V][page][layer][token][head][dim]`, float32."""

    layout = "page_first_direct"
    dtype = "torch.float32"
    layer_num, page_size, head_dim, head_num = LAYERS, PAGE_TOKENS, SIZE, HEADS

    def __init__(self, pages: int = 12) -> None:
        self.kv = np.zeros((2, pages, LAYERS, PAGE_TOKENS, HEADS, SIZE), np.float32)

    def get_page_buffer_meta(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        size, base, v_offset = self.kv[0, 0].nbytes, self.kv.ctypes.data, self.kv[0].nbytes
        numbers = [place // PAGE_TOKENS for place in list(indices)[::PAGE_TOKENS]]
        return [base + n * size + part for n in numbers for part in (0, v_offset)], [size] * 2 * len(numbers)

    def fill(self, model: Any, tokens: Sequence[int], first: int) -> None:
        """What SGLang has computed of this prompt, in the pages from `first` on."""
        with torch.inference_mode():
            cache = model(torch.tensor([list(tokens)])).past_key_values
        for layer, found in enumerate(cache.layers):
            for half, kv in enumerate((found.keys, found.values)):
                pages = kv[0].transpose(0, 1).reshape(-1, PAGE_TOKENS, HEADS, SIZE).numpy()
                self.kv[half, first : first + len(pages), layer] = pages


def wanted(pages: Sequence[str], first: int) -> PageTransfer:
    places = range(first * PAGE_TOKENS, (first + len(pages)) * PAGE_TOKENS)
    return PageTransfer(KV, pages, list(places))


@pytest.fixture(scope="module")
def model() -> Any:
    return make("grouped heads")


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture
def thread() -> Iterator[PoolThread]:
    made = PoolThread(SGLangOptions.parse(SHARE))
    yield made
    made.end()


def storage(folder: Path, memory: HostMemory, thread: PoolThread) -> PageStorage:
    options = SGLangOptions.parse({**SHARE, "cache_folder": str(folder / "digests")})
    identity = Identity("tiny", {}, HEADS, Ranks(), source=ModelSource(str(folder), "float32", HEADS))
    made = PageStorage(options, identity, thread)
    made.register(KV, memory, list(range(PAGE_TOKENS)))
    return made


def test_nothing_is_shared_before_the_known_prompt(folder: Path, model: Any, thread: PoolThread) -> None:
    memory, tokens = HostMemory(), prompt(48, seed=4)
    made, pages = storage(folder, memory, thread), [page.hex() for page in page_hashes(tokens)]
    memory.fill(model, tokens, 0)
    memory.fill(model, KNOWN_PROMPT, 4)
    assert made.store([], wanted(pages, 0)) == [False] * 3
    assert made.find([], pages) == 0 and made.counters["share_left_out_gate_waiting"] == 1
    assert made.store([], wanted(KNOWN_PAGES, 4)) == [True] * 4, "its pages are shared like others"
    assert made.counters["share_probe_agrees"] == 1
    assert made.store([], wanted(pages, 0)) == [True] * 3
    before = memory.kv[:, :3].copy()
    assert made.find([], pages) == 3
    assert made.load([], wanted(pages, 9)) == [True] * 3
    np.testing.assert_array_equal(memory.kv[:, 9:12], before)


def test_who_forgets_the_known_prompt_is_told_once(
    folder: Path, model: Any, thread: PoolThread, caplog: pytest.LogCaptureFixture
) -> None:
    memory, tokens = HostMemory(), prompt(48, seed=4)
    made, pages = storage(folder, memory, thread), [page.hex() for page in page_hashes(tokens)]
    with caplog.at_level(logging.WARNING, "kvservice.connector"):
        assert made.find([], KNOWN_PAGES) == 0
        assert WAITS_FOR_PROMPT not in caplog.messages, "it is on its way"
        for _ in range(2):
            assert made.find([], pages) == 0
            assert made.store([], wanted(pages, 0)) == [False] * 3
    assert caplog.messages.count(WAITS_FOR_PROMPT) == 1


def test_who_sends_the_known_prompt_is_told_the_distance(
    folder: Path, model: Any, thread: PoolThread, caplog: pytest.LogCaptureFixture
) -> None:
    memory = HostMemory()
    made = storage(folder, memory, thread)
    memory.fill(model, KNOWN_PROMPT, 0)
    with caplog.at_level(logging.INFO, "kvservice.connector"):
        assert made.store([], wanted(KNOWN_PAGES, 0)) == [True] * 4
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert caplog.text.count("this engine shares pages: K ") == 1


def test_pages_that_are_not_the_models_are_never_shared(folder: Path, model: Any, thread: PoolThread) -> None:
    memory = HostMemory()
    made = storage(folder, memory, thread)
    memory.fill(model, KNOWN_PROMPT, 0)
    memory.kv = memory.kv[::-1].copy()  # V where K belongs
    for _ in range(2):
        assert made.store([], wanted(KNOWN_PAGES, 0)) == [False] * 4
    assert made.counters["share_probe_differs"] == 1
    assert made.find([], KNOWN_PAGES) == 0 and made.counters["share_left_out_gate_shut"] == 1


def test_one_page_of_the_known_prompt_is_too_little(folder: Path, model: Any, thread: PoolThread) -> None:
    memory = HostMemory()
    made = storage(folder, memory, thread)
    memory.fill(model, KNOWN_PROMPT, 0)
    assert made.store([], wanted(KNOWN_PAGES[:1], 0)) == [False]
    assert made.store([*KNOWN_PAGES[:1]], wanted(KNOWN_PAGES[1:], 1)) == [False] * 3
    assert not made.counters["share_probe_agrees"] and not made.counters["share_probe_differs"]


def test_slot_has_k_and_v_layer_by_layer() -> None:
    memory, slot = HostMemory(), np.zeros(2 * LAYERS * PAGE_TOKENS * HEADS * SIZE * 4, np.uint8)
    memory.kv[:] = np.random.default_rng(1).standard_normal(memory.kv.shape, np.float32)
    addresses, sizes = memory.get_page_buffer_meta(range(2 * PAGE_TOKENS, 3 * PAGE_TOKENS))
    form = SharedPageForm(tuple(sizes), layer_count=LAYERS)
    form.store(addresses, 0)(slot)
    in_slot: Array = slot.view(np.float32).reshape(LAYERS, 2, PAGE_TOKENS, HEADS, SIZE)
    np.testing.assert_array_equal(in_slot, memory.kv[:, 2].swapaxes(0, 1))
    memory.kv[:, 2] = 0
    form.load(addresses, 0)(slot)
    np.testing.assert_array_equal(in_slot, memory.kv[:, 2].swapaxes(0, 1))
    assert form.names("ab" * 32) == [bytes.fromhex("ab" * 32)]


@pytest.mark.parametrize(
    ("changed", "ranks", "reason"),
    [
        ({"page_size": 64}, Ranks(), "choose --page-size 16"),
        ({"layout": "layer_first"}, Ranks(), "choose page_first_direct"),
        ({}, Ranks(0, 2), "2 tensor-parallel ranks"),
        ({}, Ranks(replicated=True), "latent attention"),
        ({"dtype": "torch.float8_e4m3fn"}, Ranks(), "for a model in float32"),
        ({"head_num": 1}, Ranks(), "1 KV heads here of 2"),
    ],
)
def test_engine_that_was_not_compared_is_refused_by_name(
    folder: Path, changed: dict[str, Any], ranks: Ranks, reason: str
) -> None:
    pool: Any = HostMemory()
    for name, value in changed.items():
        setattr(pool, name, value)
    with pytest.raises(UnsupportedLayout, match=reason):
        shared_of(ModelSource(str(folder), "float32", HEADS), pool, ranks, SGLangOptions.parse(SHARE))


def test_pieces_that_are_not_k_and_v_are_refused(folder: Path) -> None:
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == LAYERS
    given_ = SGLangOptions.parse({**SHARE, "cache_folder": str(folder / "digests")})
    model = shared_of(ModelSource(str(folder), "float32", HEADS), HostMemory(), Ranks(), given_)
    whole = model.layout.payload_bytes
    for sizes in ((whole,), (whole, whole), (whole // 4, 3 * whole // 4)):
        with pytest.raises(UnsupportedLayout, match="not K and V of the model"):
            form_of(model, sizes)
    with pytest.raises(ConfigError, match="a shared page holds all heads"):
        SGLangOptions.parse({**SHARE, "head_group": 1})
