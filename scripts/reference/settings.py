"""docs/reference/settings.md and the pages of options from the definitions."""

from __future__ import annotations

from pydantic.fields import FieldInfo

from kvservice.config import OTHER_VARIABLES, ServiceConfig, Settings, allowed, default_of, shown
from kvservice.connector.lmcache.options import AdapterOptions
from kvservice.connector.options import ConnectorOptions
from kvservice.connector.sglang.options import SGLangOptions

HEAD = """# Settings

<!-- Made from kvservice/config.py by `make docs-reference`. Do not edit. -->

Settings of a service. Those of an engine are its [connector options](connector-options.md). A wrong value or an unknown
name is an error that names the setting and what is allowed. A part of the service takes settings that it does not read,
so that all parts can be started with one file.

A setting can be given in three places. A later one wins:

1. a TOML file, with `--config FILE`: `lease_seconds = 4`
2. the environment: `KVSERVICE_` and the name in capitals, `KVSERVICE_LEASE_SECONDS=4`
3. the command line of `kvservice up`, `shard` and `lookup`: `--lease-seconds 4`

`kvservice config show` says which value each setting has and where it comes from; with `-o wide` it prints this list.
The chart writes such a file from its values. A size is a number of bytes, or a
number with a unit such as `512MiB` or `64GiB`.

"""

OPTIONS = """# Connector options

<!-- Made from kvservice/connector/options.py by `make docs-reference`. Do not edit. -->

These are the keys of `kv_connector_extra_config` in vLLM's `--kv-transfer-config`. An engine takes them from there and
nowhere else; what concerns the whole service is one of its [settings](settings.md). A wrong value or an unknown name
ends the start of the engine and names the option.

```console
vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVServiceConnector",
  "kv_connector_module_path": "kvservice.connector.vllm", "kv_role": "kv_both",
  "kv_connector_extra_config": {"mode": "service", "verify_load": "full"}}'
```

"Service" and "Embedded" in the last column say that an option counts in that mode only.

"""

ADAPTER = """# Options of LMCache's adapter

<!-- Made from kvservice/connector/lmcache/options.py by `make docs-reference`. Do not edit. -->

These are the keys of `adapter_params` in `--l2-adapter` of [`lmcache server`](../howto/lmcache.md). A wrong value or an
unknown name ends the start of the server and names the option. "Service" and "Embedded" in the last column say that an
option counts in that mode only.

"""

STORAGE = """# Options of SGLang's storage

<!-- Made from kvservice/connector/sglang/options.py by `make docs-reference`. Do not edit. -->

These are keys of [SGLang's](../howto/sglang.md) `--hicache-storage-backend-extra-config`, beside SGLang's own. A wrong
value or an unknown name ends the start of the engine and names the option. "Service" and "Embedded" in the last column
say that an option counts in that mode only.

"""

VARIABLES = """
## Variables that are not settings

These say which shard, tenant or key a process uses. Any other variable that begins with `KVSERVICE_` is an error.

| variable | what it says |
|---|---|
"""


def table(kind: type[Settings], *, chart: bool) -> str:
    columns = ["name", "values", "default", *(["in the chart"] if chart else []), "meaning"]
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    return head + "".join(row(name, field, chart=chart) for name, field in kind.model_fields.items())


def row(name: str, field: FieldInfo, *, chart: bool) -> str:
    default = default_of(field) or ("needed" if field.is_required() else "–")
    words = [f"`{name}`", allowed(field), default]
    if chart:
        words.append(f"`{shown(field).chart}`" if shown(field).chart else "–")
    words.append(" ".join((field.description or "").split()))
    return f"| {' | '.join(word.replace('|', chr(92) + '|') for word in words)} |\n"


def settings() -> str:
    variables = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in OTHER_VARIABLES.items())
    return HEAD + table(ServiceConfig, chart=True) + VARIABLES + variables


def options() -> str:
    return OPTIONS + table(ConnectorOptions, chart=False)


def adapter() -> str:
    return ADAPTER + table(AdapterOptions, chart=False)


def storage() -> str:
    return STORAGE + table(SGLangOptions, chart=False)


PAGES = {
    "settings.md": settings,
    "connector-options.md": options,
    "lmcache-options.md": adapter,
    "sglang-options.md": storage,
}
