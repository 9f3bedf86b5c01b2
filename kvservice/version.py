"""The version of this release, apart from `kvservice` itself, which knows the whole Python API."""

from __future__ import annotations

__version__ = "0.1.0"
