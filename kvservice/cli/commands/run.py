"""Commands that start and stop what serves: the whole service, or one part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvservice.cli.exits import ExitCode
from kvservice.cli.tree import Address, Config, JsonLogs, LeafWithSettings, Service, command, given_settings
from kvservice.errors import ConfigError

GROUP = "Run"
LOOPBACK = "127.0.0.1"
DEV_SHM = Path("/dev/shm")


class UpLeaf(LeafWithSettings):
    """It starts lookup partitions itself, and asks no others."""

    @classmethod
    def reads(cls, name: str) -> bool:
        return name != "lookup"


class ShardLeaf(LeafWithSettings):
    """It is told of the lookup partitions, and nothing of Ray is there."""

    @classmethod
    def reads(cls, name: str) -> bool:
        return name not in {"lookup_partitions", "lookup_port", "copy_workers", "head_shard"}


class LookupLeaf(LeafWithSettings):
    @classmethod
    def reads(cls, name: str) -> bool:
        return name in {
            "service",
            "lookup_partitions",
            "lookup_port",
            "heartbeat_seconds",
            "runtime_dir",
            "metrics_port",
            "traces",
            "tls_dir",
            "allow_plaintext",
        }


def add(tree: typer.Typer) -> None:
    """Add this module's commands to the tree, in the order of the help."""
    command(tree, GROUP, "kvservice demo")(demo)
    command(
        tree,
        GROUP,
        "kvservice up --pool-bytes 64GiB",
        "kvservice up --no-ray --pool-bytes 4GiB --metrics-port 9400",
        "kvservice up --address 10.0.0.5:6379 --config kvservice.toml",
        kind=UpLeaf,
    )(up)
    command(tree, GROUP, "kvservice down", "kvservice down --service prod", "kvservice down --keep-blocks")(down)
    command(
        tree,
        GROUP,
        "kvservice shard --node n0 --pool-bytes 64GiB",
        "kvservice shard --node n0 --host 10.0.0.7 --port 7401 --lookup 10.0.0.5:7400 --tls-dir /etc/kvservice/tls",
        kind=ShardLeaf,
    )(shard)
    command(
        tree,
        GROUP,
        "kvservice lookup --lookup-partitions 1",
        "kvservice lookup --partition 1 --host 10.0.0.6 --tls-dir /etc/kvservice/tls",
        kind=LookupLeaf,
    )(lookup)
    command(tree, GROUP, "kvservice copy-worker --node n0 --device 0", name="copy-worker")(copy_worker)
    command(
        tree,
        GROUP,
        "kvservice proxy --prefill http://a:8000 --decode http://b:8000",
    )(proxy)


def demo() -> None:
    """See one remote hit on this machine, in seconds.

    It runs two cache shards, needs no engine and no model, and leaves nothing behind."""
    from kvservice.cli import demo as run

    run.run()


def up(
    context: typer.Context,
    config: Config = None,
    address: Address = None,
    no_ray: Annotated[bool, typer.Option("--no-ray", help="Run one node in the foreground, without Ray.")] = False,
) -> None:
    """Start the service on a Ray cluster, or without Ray.

    It starts a cache shard on every node of the Ray cluster, and before that a Ray cluster of this machine if there is
    none. With --no-ray it runs one node in this process, with one lookup partition and without copy workers, until
    Ctrl-C."""
    from kvservice.cli import lifecycle
    from kvservice.cli.settings import load

    loaded = load(config, given_settings(context))
    if no_ray and address is not None:
        raise ConfigError("--no-ray runs one node here, and --address names a Ray cluster: leave one of them out")
    lifecycle.run_foreground(loaded) if no_ray else lifecycle.up(loaded, address)


def down(
    service: Service = None,
    address: Address = None,
    keep_blocks: Annotated[
        bool, typer.Option("--keep-blocks", help="Keep the blocks of disk tiers for the next start.")
    ] = False,
) -> None:
    """Stop the service and remove what it made.

    Blocks in shared memory are lost. A service that runs without Ray is ended where it was started; what it left when
    it was killed is removed, with --keep-blocks all but its blocks."""
    from kvservice.cli import lifecycle
    from kvservice.client.members import chosen_service
    from kvservice.config import load_config

    config = load_config(service=chosen_service(service))
    lifecycle.down(config.service, address, keep_blocks=keep_blocks, disk_path=config.disk_path)


def shard(
    context: typer.Context,
    node: Annotated[
        str,
        typer.Option(
            "--node", envvar="KVSERVICE_NODE", metavar="NODE", help="Name of this machine, unique in the service."
        ),
    ],
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="HOST", help="Address on which this node listens and which it gives to other nodes."
        ),
    ] = LOOPBACK,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            metavar="PORT",
            help="Port for other nodes. 0: any free one; on loopback without TLS a Unix socket.",
        ),
    ] = 0,
    config: Config = None,
    segment_dir: Annotated[
        Path, typer.Option(metavar="PATH", help="Folder in memory for the pool; engines need the same path.")
    ] = DEV_SHM,
    keep_blocks: Annotated[
        bool, typer.Option("--keep-blocks", help="Keep the blocks in memory for the next start on this machine.")
    ] = False,
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Seconds that readers get to finish after SIGTERM.")
    ] = 20.0,
    json_logs: JsonLogs = False,
) -> None:
    """Run this machine's cache shard without Ray.

    It runs in the foreground. SIGTERM drains it and ends it."""
    from kvservice.cli import processes
    from kvservice.cli.settings import load
    from kvservice.observe import logs

    logs.configure(json_lines=json_logs)
    loaded = load(config, given_settings(context))
    processes.run_shard(loaded, node, host, port, segment_dir.absolute(), keep_blocks=keep_blocks, grace_seconds=grace)


def lookup(
    context: typer.Context,
    partition: Annotated[int, typer.Option(min=0, metavar="N", help="Number of this lookup partition, from 0.")] = 0,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")] = LOOPBACK,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            metavar="PORT",
            help="Port. 0: any free one, printed at start. Default: that of --lookup-port; else 7400, and on loopback "
            "without TLS a Unix socket.",
        ),
    ] = None,
    config: Config = None,
    json_logs: JsonLogs = False,
) -> None:
    """Run one lookup partition without Ray.

    It runs in the foreground, until SIGTERM."""
    from kvservice.cli import processes
    from kvservice.cli.settings import load
    from kvservice.observe import logs

    logs.configure(json_lines=json_logs)
    processes.run_lookup(load(config, given_settings(context)), partition, host, port)


def copy_worker(
    node: Annotated[
        str,
        typer.Option(
            "--node",
            envvar="KVSERVICE_NODE",
            metavar="NODE",
            help="Name of this machine, which its shard was started with.",
        ),
    ],
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="cpu, or a GPU: its UUID, or its index here.")
    ] = "cpu",
    service: Annotated[
        str, typer.Option(envvar="KVSERVICE_SERVICE", metavar="NAME", help="Name of the installation.")
    ] = "default",
    wedge_seconds: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Seconds after which a copy counts as hung.")
    ] = 10.0,
    json_logs: JsonLogs = False,
) -> None:
    """Run a copy worker for engines of this machine.

    It runs in the foreground, until SIGTERM. It ends by itself when a copy hangs or when it loses its GPU; exit codes
    tell which. Then start it again."""
    from kvservice.cli.processes import node_named, warn_without_shard
    from kvservice.copying.process import run
    from kvservice.copying.worker.server import CopyWorkerConfig
    from kvservice.observe import logs

    logs.configure(json_lines=json_logs)
    node_id = node_named(node)
    warn_without_shard(service, node_id)
    ended = run(CopyWorkerConfig(service, node_id, wedge_seconds=wedge_seconds), device)
    raise typer.Exit(ExitCode(ended))


def proxy(
    decode: Annotated[
        list[str], typer.Option(metavar="URL", help="Decode server, e.g. http://host:8000. Repeat for more.")
    ],
    prefill: Annotated[list[str] | None, typer.Option(metavar="URL", help="Prefill server. Repeat for more.")] = None,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")] = LOOPBACK,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="PORT", help="Port. 0: any free one, named in the log.")
    ] = 8080,
    min_prefill_chars: Annotated[
        int, typer.Option(metavar="N", help="Prompts with fewer characters go straight to decode.")
    ] = 512,
    in_flight: Annotated[int, typer.Option(metavar="N", help="Most requests under way to one server.")] = 256,
    tries: Annotated[int, typer.Option(min=1, metavar="N", help="Number of servers that one request may fail on.")] = 2,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest request body.")] = "32MiB",
    connect_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds to connect to a server.")] = 5.0,
    prefill_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds for a prefill; then another server is tried.")
    ] = 120.0,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds for a whole request.")] = 900.0,
    check_interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds between health checks of a server.")
    ] = 5.0,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds that requests under way get after SIGTERM.")
    ] = 30.0,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="KVSERVICE_PROXY_API_KEY",
            metavar="KEY",
            help="Key for the proxy's own probes; clients send their own.",
        ),
    ] = None,
    traces: Annotated[
        str, typer.Option(envvar="KVSERVICE_TRACES", metavar="PLACE", help="Where spans go: off, otlp, or file:/path.")
    ] = "off",
    json_logs: JsonLogs = False,
) -> None:
    """Put one OpenAI API before prefill and decode servers.

    The servers are ordinary vLLM servers. Ray Serve is not needed."""
    from kvservice.observe import logs
    from kvservice.proxy.server import run
    from kvservice.proxy.settings import parse_settings

    logs.configure(json_lines=json_logs)
    run(
        parse_settings(
            prefill or [],
            decode,
            host=host,
            port=port,
            min_prefill_chars=min_prefill_chars,
            in_flight_max=in_flight,
            tries=tries,
            max_body=max_body,
            connect_seconds=connect_timeout,
            prefill_seconds=prefill_timeout,
            request_seconds=timeout,
            check_seconds=check_interval,
            grace_seconds=grace,
            api_key=api_key,
            traces=traces,
        )
    )
