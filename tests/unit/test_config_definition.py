"""One definition of each setting: the chart, the command line, the engine's options and the page agree with it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvservice.cli import main
from kvservice.cli.commands import run
from kvservice.cli.settings import load
from kvservice.config import LEASE_SECONDS_MIN, ServiceConfig, load_config, shown
from kvservice.connector.options import ConnectorOptions
from kvservice.core.acquire.pulls import LEASE_MARGIN_SECONDS
from kvservice.core.segment.geometry import plan_geometry
from kvservice.core.store.eviction import LeafFirstLru
from kvservice.errors import ConfigError
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.tier_specs import DiskWalk, TierSpec, _held_bytes, free_bytes, tier_specs
from kvservice.proxy.settings import ProxySettings
from kvservice.serve.section import parse_section
from kvservice.session.pool_choice import choose_pool
from kvservice.units import parse_bytes
from tests.integration.engine import spec

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "helm" / "kvservice"
BY_CHART = {name: shown(field).chart for name, field in ServiceConfig.model_fields.items() if shown(field).chart}


def chart_rule(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    for part in path.split("."):
        found = found["properties"][part]
    return found


def test_every_setting_but_computed_ones_is_in_the_chart() -> None:
    template = (CHART / "templates" / "_config.tpl").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    # `lookup` is computed; `traces` needs variables of OpenTelemetry and goes with them, by extraEnv; `accept_spill` is
    # of single nodes.
    assert set(ServiceConfig.model_fields) - set(BY_CHART) == {"lookup", "traces", "accept_spill"}
    for name, path in BY_CHART.items():
        *groups, key = path.split(".")
        assert key in functools.reduce(lambda found, group: found[group], groups, values)
        assert f"\n{name} = " in template, name


@pytest.mark.parametrize(("name", "path"), BY_CHART.items(), ids=list(BY_CHART))
def test_chart_takes_no_value_that_the_setting_refuses(name: str, path: str) -> None:
    own, chart = ServiceConfig.model_json_schema()["properties"][name], chart_rule(path)
    if "minimum" in chart:
        assert chart["minimum"] >= own.get("minimum", 0)
    if "maximum" in own and own["type"] in ("integer", "number"):
        assert chart["maximum"] <= own["maximum"]
    if "enum" in own:
        assert chart["enum"] == own["enum"]
    if "pattern" in own and not own["pattern"].startswith("^(/"):
        assert chart["pattern"] == own["pattern"]


@pytest.mark.parametrize("path", ["lookup.port", "cache.metricsPort"])
def test_chart_takes_ports_up_to_the_last_one_of_the_setting(path: str) -> None:
    (name,) = (name for name, place in BY_CHART.items() if place == path)
    highest = chart_rule(path)["maximum"]
    assert load_config(None, {}, **{name: highest})
    with pytest.raises(ConfigError, match=name):
        load_config(None, {}, **{name: highest + 1})


@pytest.mark.parametrize("name", ["up", "shard", "lookup"])
def test_every_setting_is_an_option_of_its_name(name: str) -> None:
    found = typer.main.get_command(main.app).commands[name]  # type: ignore[attr-defined]
    with found.make_context(name, ["--node", "n0"] if name == "shard" else []) as context:
        flags = {flag for param in found.get_params(context) for flag in param.opts}
    assert {f"--{setting.replace('_', '-')}" for setting in ServiceConfig.model_fields} <= flags


def test_an_option_takes_what_the_setting_takes() -> None:
    for name, field in ServiceConfig.model_fields.items():
        value = list(field.default) if isinstance(field.default, tuple) else str(field.default)
        assert getattr(load(None, {name: value}), name) == field.default
    assert load(None, {"lookup": ["a:1", "b:2"]}).lookup == ("a:1", "b:2")
    assert load(None, {"pool_bytes": None}).pool_bytes == ServiceConfig().pool_bytes


def test_eviction_is_a_setting_in_every_source(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('eviction = "lru"\n')
    assert load_config(file, {}).eviction == "lru"
    assert load_config(None, {"KVSERVICE_EVICTION": "lru"}).eviction == "lru"
    assert load(None, {"eviction": "lru"}).eviction == "lru"
    assert parse_section({"settings": {"eviction": "lru"}}).service_config().eviction == "lru"


TIERED = {
    "disk_path": "/mnt/blocks",
    "disk_bytes": "1TiB",
    "disk_write": "reused",
    "disk_codec": "planes+aesgcm",
    "disk_io": "nixl-posix",
    "objects_url": "s3://bucket/prefix",
    "objects_write": "stored",
    "objects_namespace": "prod",
}


def test_tiers_are_settings_of_a_service_and_of_an_embedded_pool() -> None:
    service, engine = load(None, TIERED), ConnectorOptions.parse({"mode": "embedded", "memory": "16MiB", **TIERED})
    variables = {f"KVSERVICE_{name.upper()}": text for name, text in TIERED.items()}
    assert load_config(None, variables) == service
    wanted = (
        TierSpec("disk", "/mnt/blocks/prod/n0", 1 << 40, "reused", "planes+aesgcm", io="nixl-posix"),
        TierSpec("objects", "s3://bucket/prefix", 0, "stored", "none", "prod"),
    )
    no_room = lambda place: 0  # noqa: E731
    assert tier_specs(service, "prod/n0", no_room) == wanted == tier_specs(engine, "prod/n0", no_room)
    assert tier_specs(ServiceConfig(), "prod/n0", no_room) == ()


def test_a_disk_without_a_size_takes_most_of_what_is_free(tmp_path: Path) -> None:
    held = tmp_path / "prod" / "n0" / "aa"
    held.mkdir(parents=True)
    (held / "block").write_bytes(bytes(1 << 20))
    walk = DiskWalk()
    found, other = (free_bytes(place, walk) for place in (tmp_path / "prod" / "n0", tmp_path / "not" / "there"))
    free = shutil.disk_usage(tmp_path).free
    assert 0.5 * free < found < 0.95 * (free + (1 << 20)) and 0.5 * free < other < free
    assert _held_bytes(tmp_path / "prod" / "n0", walk) == 1 << 20 and _held_bytes(tmp_path / "none", walk) == 0
    assert walk.files == 2, "each walk counts"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"disk_bytes": "1TiB"}, "disk_path is empty: give disk_path too"),
        ({"disk_codec": "planes"}, "disk_path is empty"),
        ({"objects_namespace": "prod"}, "objects_url is empty: give objects_url too"),
        ({"disk_path": "/d", "disk_bytes": "1MiB"}, "give at least 4.0 MiB, or 0"),
        ({"disk_path": "blocks"}, "give an absolute path"),
        ({"disk_path": "/d", "disk_write": "always"}, "give evicted, stored or reused"),
        ({"objects_url": "bucket"}, "such as s3://bucket/prefix"),
        ({"objects_url": "s3://name:secret@bucket"}, "it holds a password"),
        ({"max_age_seconds": -1}, "at least 0 seconds"),
    ],
)
def test_a_refused_tier_says_what_to_give(given: dict[str, Any], words: str) -> None:
    for make in (lambda: ServiceConfig(**given), lambda: ConnectorOptions.parse({"mode": "embedded", **given})):
        with pytest.raises(ConfigError, match=words) as refused:
            make()
        assert "secret" not in str(refused.value)


def test_an_engine_of_a_service_is_told_where_its_disk_is_set() -> None:
    with pytest.raises(ConfigError, match="kvservice up --disk-path"):
        ConnectorOptions.parse({"mode": "service", "disk_path": "/mnt/blocks"})


async def test_embedded_pool_evicts_as_its_option_says() -> None:
    choice = choose_pool(ConnectorOptions.parse({"mode": "embedded", "memory": "16MiB", "eviction": "lru"}), spec())
    pool = await choice.open()
    assert isinstance(pool, PoolRuntime)
    await asyncio.sleep(0)  # its checks begin
    try:
        assert pool._config.eviction is LeafFirstLru
    finally:
        await pool.close()


def test_unknown_policy_ends_the_start_of_an_engine() -> None:
    options = ConnectorOptions.parse({"mode": "embedded", "memory": "16MiB", "eviction": "clock"})
    with pytest.raises(ConfigError, match=r"no package offers the eviction policy 'clock'.*built in: default, lru"):
        choose_pool(options, spec())


def test_limits_that_depend_on_each_other_fit() -> None:
    assert LEASE_SECONDS_MIN > LEASE_MARGIN_SECONDS, "a pull would have no time before its lease ends"
    smallest = load_config(None, {}, pool_bytes="4MiB")
    assert plan_geometry(smallest.pool_bytes).slab_count >= 1


def test_proxy_has_the_defaults_of_its_settings() -> None:
    own = {field.name: field.default for field in fields(ProxySettings)}
    names = {
        "in_flight": "in_flight_max",
        "connect_timeout": "connect_seconds",
        "prefill_timeout": "prefill_seconds",
        "timeout": "request_seconds",
        "check_interval": "check_seconds",
        "grace": "grace_seconds",
    }
    typed = {names.get(name, name): each.default for name, each in inspect.signature(run.proxy).parameters.items()}
    assert parse_bytes(typed.pop("max_body")) == own["body_bytes_max"]
    shared = set(typed) & set(own) - {"prefill", "decode"}
    assert len(shared) == 12 and {name: typed[name] for name in shared} == {name: own[name] for name in shared}
