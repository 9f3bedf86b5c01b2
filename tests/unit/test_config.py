"""Settings: where they come from, which one wins, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvservice.config import ServiceConfig, load_config
from kvservice.errors import ConfigError
from kvservice.units import GiB


def test_command_line_wins_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('pool_bytes = "1GiB"\nlookup_partitions = 3\ntransport = "shm"\n')
    environment = {"KVSERVICE_POOL_BYTES": "2GiB", "KVSERVICE_LOOKUP_PARTITIONS": "4"}
    config = load_config(file, environment, pool_bytes="3GiB")
    assert (config.pool_bytes, config.lookup_partitions, config.transport) == (3 * GiB, 4, "shm")
    assert config.service == "default"


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text("lookup_partition = 2\n")
    with pytest.raises(ConfigError, match="unknown setting 'lookup_partition'; did you mean 'lookup_partitions'"):
        load_config(file, {})


def test_an_unknown_variable_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match="did you mean 'pool_bytes'"):
        load_config(None, {"KVSERVICE_POOL_BYTE": "1GiB"})


@pytest.mark.parametrize(
    "name", ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_7400_TCP_ADDR", "LOOKUP_PORT"]
)
def test_a_variable_of_kubernetes_says_how_to_turn_it_off(name: str) -> None:
    with pytest.raises(ConfigError, match=r"enableServiceLinks: false. in the pod"):
        load_config(None, {f"KVSERVICE_{name}": "tcp://10.0.0.1:7400"})
    if name != "LOOKUP_PORT":  # a setting, too
        with pytest.raises(ConfigError, match="for a Service named kvservice"):
            load_config(None, {f"KVSERVICE_{name}": "7400"})


def test_a_wrong_setting_says_nothing_of_kubernetes() -> None:
    for wrong in ({"KVSERVICE_LOOKUP_PORT": "x"}, {"KVSERVICE_POOL_BYTE": "1GiB"}):
        with pytest.raises(ConfigError) as caught:
            load_config(None, wrong)
        assert "Kubernetes" not in caught.value.message


@pytest.mark.parametrize("name", ["path", "environment", "self"])
def test_a_name_of_no_setting_is_refused_whatever_it_is(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        load_config(None, {}, **{name: "x"})


@pytest.mark.parametrize("name", ["KVSERVICE_NODE", "KVSERVICE_TEST_SESSION", "OTHER_POOL"])
def test_variables_that_configure_no_service_are_left_alone(name: str) -> None:
    assert load_config(None, {name: "x"}) == ServiceConfig()


@pytest.mark.parametrize("budget", ["0", 0, "-1", "-2GiB", "1KiB"])
def test_a_budget_that_holds_nothing_says_what_to_do(budget: object) -> None:
    with pytest.raises(ConfigError, match=r"at least 4\.0 MiB"):
        load_config(None, {}, pool_bytes=budget)


def test_a_size_that_is_none_is_quoted() -> None:
    with pytest.raises(ConfigError, match="pool_bytes: not a size: 'much'"):
        load_config(None, {}, pool_bytes="much")


def test_a_count_is_not_a_size() -> None:
    with pytest.raises(ConfigError, match="lookup_partitions"):
        load_config(None, {}, lookup_partitions="2k")


@pytest.mark.parametrize(
    "wrong",
    [
        {"service": "a/b"},
        {"service": ""},
        {"service": "x" * 33},
        {"lookup_partitions": 0},
        {"lookup_partitions": 65},
        {"transport": "tcp"},
        {"lease_seconds": 0.0},
        {"heartbeat_seconds": 0.0},
        {"slab_bytes": -1},
        {"lookup_port": 80},
        {"lookup_port": 65_535},
        {"runtime_dir": "relative"},
        {"metrics_port": 70_000},
    ],
)
def test_values_out_of_range_name_their_setting(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(wrong))}\b.*give "):
        load_config(None, {}, **wrong)


def test_a_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("pool_bytes 1\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config(file, {})
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml"):
        load_config(tmp_path / "absent.toml", {})


def test_the_settings_stay_few() -> None:
    assert len(ServiceConfig.model_fields) <= 32


@pytest.mark.parametrize("value", ["auto", "off", "0", "8"])
def test_copy_workers_may_be_a_word_or_a_number(value: str) -> None:
    assert load_config(None, {"KVSERVICE_COPY_WORKERS": value}).copy_workers == value
    assert load_config(None, {}, copy_workers=int(value) if value.isdecimal() else value).copy_workers == value


@pytest.mark.parametrize("value", ["yes", "-1", "65", ""])
def test_copy_workers_says_what_is_allowed(value: str) -> None:
    with pytest.raises(ConfigError, match="auto, off, or a number"):
        load_config(None, {"KVSERVICE_COPY_WORKERS": value})


def test_lookup_partitions_elsewhere_keep_their_order() -> None:
    config = load_config(None, {"KVSERVICE_LOOKUP": "dns:///b.svc:7400, 10.0.0.1:7400,[::1]:7400"})
    assert config.lookup == ("dns:///b.svc:7400", "10.0.0.1:7400", "[::1]:7400")
    assert ServiceConfig().lookup == ()


@pytest.mark.parametrize("wrong", ["host", "host:", "http://host:1", "::1:7400", "a:1,b"])
def test_a_wrong_lookup_address_is_named(wrong: str) -> None:
    with pytest.raises(ConfigError, match="lookup has"):
        load_config(None, {}, lookup=wrong)


@pytest.mark.parametrize("text", ["2GiB", "2Gi", "2g", "2 GB", "2147483648"])
def test_a_size_is_read_in_every_common_form(text: str) -> None:
    assert load_config(None, {}, pool_bytes=text).pool_bytes == 2 * GiB


@pytest.mark.parametrize("text", ["2i", "2X", "GiB", "2GiBi"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        load_config(None, {}, pool_bytes=text)


def test_an_ipv6_address_without_brackets_is_told_its_form() -> None:
    with pytest.raises(ConfigError, match=r"lookup has 'fd78::1:7400'; write .*\[IPv6 address\]:port"):
        load_config(None, {}, lookup="fd78::1:7400")
    assert load_config(None, {}, lookup="[fd78::1]:7400").lookup == ("[fd78::1]:7400",)
