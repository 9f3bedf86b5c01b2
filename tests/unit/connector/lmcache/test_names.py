"""What is in the name of an object of LMCache: everything that changes its bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kvservice.connector.lmcache.names import ObjectLayout, identity_of, object_hash, rows_of
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.numbers import numbers_of


@dataclass(frozen=True)
class Key:
    """LMCache's ObjectKey."""

    chunk_hash: bytes = b"chunk"
    model_name: str = "m"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


SHAPE = [1, 30, 64, 384]
LAYOUT = ObjectLayout.of([SHAPE], [torch.bfloat16], "KV_2LTD")


@pytest.mark.parametrize(
    "other",
    [Key(chunk_hash=b"chunl"), Key(kv_rank=0x02000200), Key(object_group_id=1), Key(cache_salt="tenant")],
    ids=["chunk", "rank", "group", "salt"],
)
def test_each_part_of_a_key_makes_another_name(other: Key) -> None:
    assert object_hash(other) != object_hash(Key()) == object_hash(replace(other, **vars(Key())))


def test_parts_of_a_key_do_not_run_into_each_other() -> None:
    assert object_hash(Key(kv_rank=1, object_group_id=11)) != object_hash(Key(kv_rank=11, object_group_id=1))


def test_what_lmcache_does_not_name_makes_other_blocks() -> None:
    identities = [
        identity_of("m", LAYOUT, "v1", "x86"),
        identity_of("n", LAYOUT, "v1", "x86"),
        identity_of("m", LAYOUT, "v2", "x86"),
        identity_of("m", LAYOUT, "v1", "x86 amx"),
        identity_of("m", ObjectLayout.of([SHAPE], [torch.float16], "KV_2LTD"), "v1", "x86"),
        identity_of("m", ObjectLayout.of([[1, 30, 384, 64]], [torch.bfloat16], "KV_2LTD"), "v1", "x86"),
        identity_of("m", ObjectLayout.of([SHAPE], [torch.bfloat16], "KV_MLA_FMT"), "v1", "x86"),
        identity_of("m", ObjectLayout.of([SHAPE, SHAPE], [torch.bfloat16] * 2, "KV_2LTD"), "v1", "x86"),
    ]
    assert len({Fingerprint.of(fields).digest for fields in identities}) == len(identities)


def test_a_layout_says_its_bytes_and_tokens() -> None:
    assert (LAYOUT.size_bytes, LAYOUT.tokens) == (30 * 64 * 384 * 2, 64)
    two = ObjectLayout.of([[3, 5], [7]], [torch.float32, torch.uint8], "KV_2LTD")
    assert (two.size_bytes, two.tokens) == (67, 1)
    assert ObjectLayout.of([[2, 3]], [torch.int8], "KV_2LTD").tokens == 1
    assert ObjectLayout.of([[2, 3, 4]], [torch.int8], "EC_TD").tokens == 1
    assert str(LAYOUT) == "KV_2LTD bfloat16 1x30x64x384"


def test_a_server_calls_its_one_format_by_two_names() -> None:
    """The allocators of LMCache's server differ in their default and not in what they hold."""
    assert ObjectLayout.of([SHAPE], [torch.bfloat16], "UNDEFINED") == LAYOUT


def test_a_layout_of_many_tensors_still_fits_into_a_namespace() -> None:
    layouts = [ObjectLayout.of([SHAPE] * count, [torch.bfloat16] * count, "KV_2LTD") for count in (40, 41)]
    assert {len(str(layout)) for layout in layouts} == {64} and str(layouts[0]) != str(layouts[1])


def test_codecs_below_the_pool_know_what_an_object_is_made_of() -> None:
    fields = {name: str(value) for name, value in identity_of("m", LAYOUT, "v1", "").items()}
    numbers = numbers_of(fields)
    assert numbers is not None and (numbers.type, numbers.row) == ("bfloat16", 384)
    two = ObjectLayout.of([[3], [7]], [torch.float32, torch.uint8], "KV_2LTD")
    assert "numbers" not in identity_of("m", two, "v1", "")


def test_rows_are_by_prompt_rank_and_group_in_their_order() -> None:
    a, b, c = Key(b"a"), Key(b"b"), Key(b"a", kv_rank=1)
    assert rows_of([a, c, b, replace(c, chunk_hash=b"b")]) == [[0, 2], [1, 3]]
    assert rows_of([]) == []
