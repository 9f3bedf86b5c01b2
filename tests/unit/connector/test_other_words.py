"""Options of vLLM's SimpleCPUOffloadConnector mean here what they mean there."""

from __future__ import annotations

import pytest

from kvservice.connector.options import ConnectorOptions, Offload
from kvservice.connector.other_words import in_our_words
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


def test_what_is_said_in_our_words_stays() -> None:
    given = {"offload": "lazy", "namespace": "a"}
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
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        in_our_words(given, ranks=2)
