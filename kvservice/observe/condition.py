"""What a process says of itself to probes. Apart from the endpoint that serves it: a copy worker on a machine without
prometheus_client has a condition too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Condition:
    """What probes are told. Both texts are empty while all is well."""

    dead: str = ""  # why only a restart of the process helps
    unready: str = ""  # why it takes no new work
