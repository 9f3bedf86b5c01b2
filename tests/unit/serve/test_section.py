"""The kvservice section of an app, and what becomes of a user's own kv_transfer_config and router."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kvservice.errors import ConfigError
from kvservice.serve.section import parse_section
from kvservice.serve.wiring import (
    CONNECTOR,
    CONNECTOR_MODULE,
    ROUTER_CLASS,
    connector_config,
    router_config,
    router_defaults,
)
from kvservice.units import GiB

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def test_without_a_section_the_default_service_is_used() -> None:
    """It is found, or else started."""
    section = parse_section(None)
    assert (section.service, section.start, section.settings) == ("default", True, {})
    assert section.connector_options() == {"mode": "service", "service": "default"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rooter": "default"}, "did you mean 'router'"),
        ({"router": "round_robin"}, "'kv_aware' or 'default'"),
        ({"settings": {"pool_byte": "1GiB"}}, "did you mean 'pool_bytes'"),
        ({"settings": {"pool_bytes": "1KiB"}}, "at least 4.0 MiB"),
        ({"settings": {"service": "x"}}, "belongs in kvservice.service"),
        ({"connector": {"ofload": "lazy"}}, "did you mean 'offload'"),
        ({"connector": {"mode": "embedded"}}, "uses no service"),
        ({"connector": {"node": "n1"}}, "remove it"),
        ({"router": "default", "router_options": {"budget_ms": 5}}, "write `router: kv_aware`"),
        ({"router_options": {"budget": 5}}, "did you mean 'budget_ms'"),
        ({"service": "a b"}, "letters, digits"),
        ({"wait_seconds": 0}, "greater than 0"),
        ("default", "dictionary"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_section(given)


def test_settings_are_those_of_the_services_file() -> None:
    section = parse_section({"service": "a", "settings": {"pool_bytes": "2GiB"}})
    config = section.service_config()
    assert (config.service, config.pool_bytes, config.lookup_partitions) == ("a", 2 * GiB, 2)


def test_a_model_without_a_connector_gets_ours() -> None:
    found = connector_config(None, parse_section({"connector": {"offload": "lazy"}}), "m", "kv_both")
    assert (found["kv_connector"], found["kv_connector_module_path"]) == (CONNECTOR, CONNECTOR_MODULE)
    assert found["kv_load_failure_policy"] == "recompute"
    assert found["kv_connector_extra_config"] == {"mode": "service", "service": "default", "offload": "lazy"}


def test_what_a_user_set_of_our_connector_is_kept() -> None:
    given = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "engine_id": "mine",
        "kv_connector_extra_config": {"verify_load": "full", "mode": "auto"},
    }
    before = copy.deepcopy(given)
    found = connector_config(given, parse_section({"connector": {"offload": "lazy"}}), "m", "kv_producer")
    assert given == before
    assert (found["kv_role"], found["engine_id"]) == ("kv_both", "mine")
    options = {"verify_load": "full", "mode": "auto", "offload": "lazy", "service": "default"}
    assert found["kv_connector_extra_config"] == options


def test_a_contradiction_between_model_and_section_is_refused() -> None:
    given = {"kv_connector_extra_config": {"offload": "eager"}}
    with pytest.raises(ConfigError, match="offload = 'eager', but the kvservice section has 'lazy'"):
        connector_config(given, parse_section({"connector": {"offload": "lazy"}}), "m", "kv_both")
    with pytest.raises(ConfigError, match="service = 'other'"):
        connector_config({"kv_connector_extra_config": {"service": "other"}}, parse_section(None), "m", "kv_both")
    with pytest.raises(ConfigError, match="kv_role is 'kv_consumer'"):
        connector_config({"kv_role": "kv_consumer"}, parse_section(None), "m", "kv_producer")


def test_another_connector_is_refused_and_never_replaced() -> None:
    with pytest.raises(ConfigError, match=r"NixlConnector.*leave the model out of kvservice.models"):
        connector_config(NIXL, parse_section(None), "m", "kv_both")
    with pytest.raises(ConfigError, match="lists KVServiceConnector 0 times"):
        connector_config(multi(NIXL), parse_section(None), "m", "kv_both")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("KVServiceConnector", "kv_transfer_config must be a mapping, not a str"),
        ({"kv_connector_extra_config": "offload"}, "kv_connector_extra_config must be a mapping, not a str"),
        ({"kv_connector": "MultiConnector"}, "must have connectors, a list of mappings"),
        ({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": ["a"]}}, "list of mappings"),
    ],
)
def test_a_config_of_the_wrong_shape_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        connector_config(given, parse_section(None), "m", "kv_both")


def test_keys_left_empty_count_as_left_out() -> None:
    """As YAML reads `kv_connector_extra_config:` with nothing behind it."""
    found = connector_config({"kv_connector_extra_config": None}, parse_section(None), "m", "kv_both")
    assert found == connector_config(None, parse_section(None), "m", "kv_both")


def test_our_connector_among_several_is_filled_in() -> None:
    """The others stay."""
    found = connector_config(multi({"kv_connector": CONNECTOR}, NIXL), parse_section(None), "m", "kv_both")
    ours, theirs = found["kv_connector_extra_config"]["connectors"]
    assert theirs == NIXL
    assert (ours["kv_connector_module_path"], ours["kv_role"]) == (CONNECTOR_MODULE, "kv_both")
    assert found["kv_load_failure_policy"] == "recompute", "vLLM reads that of the MultiConnector, and not a child's"


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": [dict(child) for child in children]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_the_router_is_set_with_what_follows_from_the_model() -> None:
    section = parse_section({"router_options": {"budget_ms": 5}})
    found = router_config({"request_routing_stats_period_s": 2}, section, "m", {"tokenizer": "t", "budget_ms": 9})
    assert found == {
        "request_routing_stats_period_s": 2,
        "request_router_class": ROUTER_CLASS,
        "request_router_kwargs": {"tokenizer": "t", "budget_ms": 5},
    }


def test_the_router_makes_tokens_as_the_engine_was_told_to() -> None:
    engine = {
        "chat_template": Path("/templates/chat.jinja"),
        "chat_template_content_format": "openai",
        "default_chat_template_kwargs": {"enable_thinking": False},
        "trust_remote_code": True,
        "max_model_len": 512,
    }
    assert router_defaults(engine, "t", parse_section(None)) == {
        "service": "default",
        "tokenizer": "t",
        "chat_template": "/templates/chat.jinja",
        "content_format": "openai",
        "chat_template_kwargs": {"enable_thinking": False},
        "trust_remote_code": True,
    }


def test_a_wrong_router_option_of_a_model_is_refused_by_name() -> None:
    """While the app is built, and not in its ingress, where the router is made."""
    with pytest.raises(ConfigError, match="did you mean 'budget_ms'"):
        router_config({"request_router_kwargs": {"budget": 5}}, parse_section(None), "m", {})


def test_a_users_router_is_kept_unless_another_is_asked_for() -> None:
    theirs = {"request_router_class": "my.Router"}
    assert router_config(theirs, parse_section(None), "m", {}) == theirs
    assert router_config(theirs, parse_section({"router": "default"}), "m", {}) == theirs
    assert router_config(None, parse_section({"router": "default"}), "m", {}) is None
    with pytest.raises(ConfigError, match="write `router: default`"):
        router_config(theirs, parse_section({"router": "kv_aware"}), "m", {})
