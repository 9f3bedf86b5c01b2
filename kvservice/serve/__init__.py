"""Ray Serve: where requests go, and how an app is built with the cache in it.

`build_openai_app` and `build_pd_openai_app` are import paths for Serve files; what they need is imported in the call.
"""

from __future__ import annotations

from typing import Any

__all__ = ["build_openai_app", "build_pd_openai_app"]


def build_openai_app(config: dict) -> Any:  # type: ignore[type-arg]  # Serve makes a model of what is annotated
    """See kvservice.serve.app.build_openai_app."""
    from kvservice.serve.app import build_openai_app as build

    return build(config)


def build_pd_openai_app(config: dict) -> Any:  # type: ignore[type-arg]
    """See kvservice.serve.app.build_pd_openai_app."""
    from kvservice.serve.app import build_pd_openai_app as build

    return build(config)
