"""Options of vLLM's SimpleCPUOffloadConnector mean here what they mean there."""

from __future__ import annotations

import pytest

from kvservice.connector.options import ConnectorOptions, Offload
from kvservice.connector.vllm.simple_offload_options import in_our_words
from kvservice.errors import ConfigError
from kvservice.units import GiB

EMBEDDED: dict[str, object] = {"mode": "embedded"}


@pytest.mark.parametrize(
    ("given", "memory"),
    [
        ({"cpu_bytes_to_use": 8 * GiB}, 8 * GiB),
        ({"cpu_bytes_to_use_per_rank": 2 * GiB}, 8 * GiB),
        ({"cpu_bytes_to_use": 1 * GiB, "cpu_bytes_to_use_per_rank": 2 * GiB}, 8 * GiB),
        ({"memory": "3GiB"}, 3 * GiB),
    ],
)
def test_memory_is_of_all_ranks_together(given: dict[str, object], memory: int) -> None:
    options = ConnectorOptions.parse(in_our_words({**EMBEDDED, **given}, ranks=4))
    assert options.embedded_bytes() == memory


@pytest.mark.parametrize(("lazy", "offload"), [(True, Offload.EVICTING), (False, Offload.EAGER)])
def test_lazy_offload_stores_what_is_about_to_go(lazy: bool, offload: Offload) -> None:
    assert ConnectorOptions.parse(in_our_words({**EMBEDDED, "lazy_offload": lazy}, ranks=1)).offload is offload


def test_the_disk_is_the_tier_below_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    given = {"kv_offload_backend": "disk", "disk_path": "/ssd/kv", "disk_capacity_bytes": 100 * GiB}
    theirs = {**EMBEDDED, **given, "use_page_cache": True, "disk_buffer_slots": 4}
    with caplog.at_level("INFO", "kvservice.connector"):
        options = ConnectorOptions.parse(in_our_words(theirs, ranks=2))
    assert (options.disk_path, options.disk_bytes, options.disk_io) == ("/ssd/kv", 200 * GiB, "buffered"), (
        "of all ranks"
    )
    assert "disk_buffer_slots is left out" in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        {"kv_offload_backend": "cpu", "disk_path": "/ssd/kv", "disk_capacity_bytes": 1 * GiB},
        {"disk_capacity_bytes": 1 * GiB, "use_page_cache": True},
    ],
)
def test_without_the_back_end_disk_there_is_no_disk(given: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    assert in_our_words({**EMBEDDED, **given}, ranks=1) == EMBEDDED
    assert "disk_capacity_bytes" in caplog.text and "left out" in caplog.text


def test_what_is_said_in_our_words_stays() -> None:
    given = {"offload": "lazy", "namespace": "a", "disk_path": "/ssd/kv", "disk_bytes": "1TiB"}
    assert in_our_words(given, ranks=2) == given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lazy_offload": "yes"}, "give true or false"),
        ({"lazy_offload": True, "offload": "eager"}, "another name of offload"),
        ({"cpu_bytes_to_use_per_rank": 1 * GiB, "memory": "1GiB"}, "another name of memory"),
        ({"cpu_bytes_to_use": "8GiB"}, "a number of bytes above 0"),
        ({"cpu_bytes_to_use_per_rank": 0}, "a number of bytes above 0"),
        ({"cpu_bytes_to_use": True}, "a number of bytes above 0"),
        ({"kv_offload_backend": "tape"}, "give 'cpu' or 'disk'"),
        ({"kv_offload_backend": "disk"}, "needs disk_path"),
        ({"disk_path": "/ssd/kv", "disk_capacity_bytes": 0}, "a number of bytes above 0"),
        ({"disk_path": "/ssd/kv", "disk_capacity_bytes": 1, "disk_bytes": 1}, "another name of disk_bytes"),
        ({"disk_path": "/ssd/kv", "use_page_cache": "yes"}, "give true or false"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        in_our_words(given, ranks=2)
