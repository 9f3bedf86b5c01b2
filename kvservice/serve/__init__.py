"""Ray Serve: routes requests to the replica where they cost least, and builds apps that use the cache.

`build_openai_app` and `build_pd_openai_app` are import paths for Serve files. They import what they need when called.
"""

from __future__ import annotations

from typing import Any

__all__ = ["build_openai_app", "build_pd_openai_app"]


def build_openai_app(config: dict) -> Any:  # type: ignore[type-arg]  # Serve builds a model from the annotation
    """See kvservice.serve.app.build_openai_app."""
    from kvservice.serve.app import build_openai_app as build

    return build(config)


def build_pd_openai_app(config: dict) -> Any:  # type: ignore[type-arg]
    """See kvservice.serve.app.build_pd_openai_app."""
    from kvservice.serve.app import build_pd_openai_app as build

    return build(config)
