"""Options: typed, checked once, and a typo is an error that names what was meant."""

from __future__ import annotations

import pytest

from kvservice.connector.options import ConnectorOptions, Offload, Verify, slot_parts
from kvservice.errors import ConfigError
from kvservice.session.options import Mode
from kvservice.units import GiB, MiB


def test_nothing_given_means_the_documented_defaults() -> None:
    options = ConnectorOptions.parse({})
    assert (options.mode, options.offload, options.verify_load) == (Mode.AUTO, Offload.EAGER, Verify.SAMPLED)
    assert 0 < options.embedded_bytes() <= 4 * GiB


def test_every_option_is_converted_to_its_type() -> None:
    given = {"mode": "embedded", "memory": "512MiB", "offload": "lazy", "verify_load": "full", "namespace": "a"}
    options = ConnectorOptions.parse({**given, "fetch_timeout_seconds": 2})
    assert (options.mode, options.offload, options.verify_load) == (Mode.EMBEDDED, Offload.LAZY, Verify.FULL)
    assert options.embedded_bytes() == 512 * MiB
    assert options.fetch_timeout_seconds == 2.0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ofload": "lazy"}, "did you mean 'offload'"),
        ({"zzz": 1}, "known are"),
        ({"mode": "remote"}, "auto, service or embedded"),
        ({"verify_load": True}, "sampled, full or off"),
        ({"memory": "4 apples"}, "not a size"),
        ({"memory": 0}, "start the engine without"),
        ({"memory": "1MiB"}, "at least 4.0 MiB"),
        ({"fetch_timeout_seconds": -1}, "0 to 600"),
        ({"fetch_timeout_seconds": True}, "0 to 600 seconds"),
        ({"socket": 7}, "give a text"),
        ({"weights_version": ""}, "1 to 256 printable characters"),
        ({"weights_version": "two\nlines"}, "1 to 256 printable characters"),
        ({"weights_version": "a", "weights_version_file": "/b"}, "give one of them"),
        ({"adapter_files": "any"}, "checked or immutable"),
        ({"mode": "embedded", "node": "n1"}, "uses no service"),
        ({"handoff_loans": "on"}, "needs copier 'worker'"),
        ({"handoff_loans": True}, "auto, on or off"),
        ({"eviction": "No!"}, "default, lru, or the name of a policy"),
        ({"loan_seconds": -1}, "0 to 600"),
        ({"slot_tokens": 0}, "a multiple of the engine's block size"),
        ({"slot_tokens": 256, "offload": "evicting"}, "a slot is stored whole"),
        ({"share": "all"}, "off or engines"),
        ({"share": "engines", "copier": "worker"}, "copies blocks as they are"),
        ({"share": "engines", "layerwise": "save"}, "layers are copied as they are"),
        ({"share": "engines", "slot_tokens": 64}, "one page of 16 tokens"),
        ({"share": "engines", "offload": "evicting"}, "by its names"),
        ({"slot_tokens": 256, "handoff_loans": "on", "copier": "worker"}, "lent one by one"),
    ],
)
def test_wrong_option_is_refused_and_says_what_to_do(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ConnectorOptions.parse(given)


@pytest.mark.parametrize(
    ("loans", "device", "on"), [(None, "cuda", True), (None, "cpu", False), ("on", "cpu", True), ("off", "cuda", False)]
)
def test_blocks_are_lent_on_a_gpu_and_elsewhere_if_it_is_said(loans: str | None, device: str, on: bool) -> None:
    given = {} if loans is None else {"handoff_loans": loans}
    assert ConnectorOptions.parse({"copier": "worker", **given}).loans_on(device) is on


def test_nothing_is_lent_without_a_worker_or_from_large_slots() -> None:
    assert not ConnectorOptions.parse({"copier": "in_process"}).loans_on("cuda")
    assert not ConnectorOptions.parse({"copier": "worker", "slot_tokens": 256}).loans_on("cuda")


@pytest.mark.parametrize(("tokens", "block", "parts"), [(None, 16, 1), (16, 16, 1), (256, 16, 16), (256, 32, 8)])
def test_blocks_of_a_slot(tokens: int | None, block: int, parts: int) -> None:
    assert slot_parts(tokens, block) == parts


@pytest.mark.parametrize(("tokens", "says"), [(8, "choose 16 or 32"), (40, "choose 32 or 48")])
def test_slot_that_blocks_do_not_fill_is_refused(tokens: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        slot_parts(tokens, 16)
