"""Who may ask the console, under which names, and what a browser may do with the answers."""

from __future__ import annotations

import pytest

from kvservice.console.access import CONTENT_POLICY, check_token, is_our_name, new_token, shows_token
from kvservice.errors import ConfigError


def test_only_the_token_is_accepted() -> None:
    token = new_token()
    assert shows_token(f"Bearer {token}", token)
    for shown in (None, "", "Bearer ", f"Bearer {token}x", f"Bearer {token[:-1]}", f"Basic {token}", "Bearer \udcff"):
        assert not shows_token(shown, token)


def test_new_tokens_differ_and_pass_their_own_check() -> None:
    tokens = {new_token() for _ in range(64)}
    assert len(tokens) == 64
    assert {check_token(token) for token in tokens} == tokens


@pytest.mark.parametrize("text", ["", "short", "x" * 23, "x" * 513, "a token with blanks in it, long", "ä" * 30, "\n"])
def test_a_token_that_could_be_guessed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand"):
        check_token(text)


@pytest.mark.parametrize("host", ["127.0.0.1:7480", "localhost", "LOCALHOST:1", "[::1]:7480", "10.0.0.7", "kv.example"])
def test_addresses_and_given_names_are_ours(host: str) -> None:
    assert is_our_name(host, {"kv.example"})


@pytest.mark.parametrize("host", [None, "", "evil.example", "evil.example:7480", "localhost.evil.example", "127.1.x"])
def test_a_name_that_was_made_to_point_here_is_not_ours(host: str | None) -> None:
    assert not is_our_name(host, {"kv.example"})


def test_the_policy_allows_nothing_inline_or_from_elsewhere() -> None:
    rules = dict(rule.split(" ", 1) for rule in CONTENT_POLICY.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert rules["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in CONTENT_POLICY and "http" not in CONTENT_POLICY
