"""Finds the service of an app on the Ray cluster, or starts it. Runs in the process that builds the app."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import ray

from kvservice.actors import deploy
from kvservice.errors import Unavailable
from kvservice.serve.section import KVServiceSection

log = logging.getLogger("kvservice.serve")

POLL_SECONDS = 1.0  # between two looks for a service that somebody else starts, which takes seconds


@dataclass(frozen=True, slots=True)
class RunningService:
    name: str
    runtime_dir: str  # "" means the default of every node
    started: bool  # by this call


def ensure_service(section: KVServiceSection) -> RunningService:
    """Join Ray if this process has not, then find the service or start it. Blocks, at most `wait_seconds` for a service
    that it starts, or that somebody else is to start. A service of its own that does not come up is stopped again.

    Raises:
        Unavailable: there is no Ray cluster, or no service.
        ServiceConflict: the service runs with other settings than the section's.
        ConfigError: the service would be plaintext between machines.
    """
    if not ray.is_initialized():
        deploy.connect(section.address)
    found = deploy.find(section.service)
    deadline = time.monotonic() + section.wait_seconds
    while found is None and not section.start and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        found = deploy.find(section.service)
    if found is not None:
        if section.settings:
            deploy.up(section.service_config())  # raises if it runs with other settings
        return RunningService(section.service, found.config()["runtime_dir"], started=False)
    if not section.start:
        raise Unavailable(
            f"no service {section.service!r} came up on this Ray cluster within {section.wait_seconds:.0f} s, and "
            f"kvservice.start is false; start it with `kvservice up --service {section.service}`, or remove "
            "`start: false`"
        )
    config = section.service_config()
    handle = deploy.up(config)
    try:
        handle.wait_complete(section.wait_seconds)
    except BaseException:
        if handle.started:
            deploy.down(config.service, keep_blocks=True)
        raise
    log.info("service %s is complete", config.service)
    return RunningService(config.service, config.runtime_dir, started=handle.started)
