"""The command `kvservice`. Commands import what they need when they run, so that --help is instant.

Exit codes: 0 success, 1 something is wrong, 2 wrong usage, 3 there is no service.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from kvservice.cli import tenants
from kvservice.errors import ConfigError, KVServiceError

EXIT_PROBLEM = 1  # something is wrong; also what Python exits with after an exception
EXIT_USAGE = 2  # wrong usage, as click and most commands have it
EXIT_NO_SERVICE = 3  # there is no service: a number of its own, so that a script can start one

P = ParamSpec("P")

app = typer.Typer(
    help="A cluster-wide KV cache for LLM inference, on Ray or without it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(tenants.app, name="tenants")

Service = Annotated[str | None, typer.Option("--service", help="Name of the service. Default: 'default'.")]
Address = Annotated[
    str | None, typer.Option("--address", help="Address of the Ray cluster to join. Default: the one of this machine.")
]
Config = Annotated[Path | None, typer.Option(help="TOML file with any of the settings.")]
JsonLogs = Annotated[bool, typer.Option("--json-logs", help="Write logs as one JSON object a line.")]
LOOPBACK = "127.0.0.1"
DEV_SHM = Path("/dev/shm")
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Set any setting; `kvservice settings` lists them. Repeat for more."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]


def fail(error: KVServiceError) -> typer.Exit:
    """Print the error for people, or log it where logs are JSON. Returns the exception that ends the command."""
    from kvservice.observe import logs

    if not logs.say_error(error.message):
        typer.secho(f"error: {error.message}", err=True, fg="red")
    return typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_PROBLEM)


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command print a KVServiceError as one line and exit with its code, instead of a traceback."""

    @functools.wraps(command)
    def reporting(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            command(*arguments, **options)
        except KVServiceError as error:
            raise fail(error) from error

    return reporting


@app.command()
@reports_errors
def up(
    service: Service = None,
    pool: Annotated[
        str | None, typer.Option(help="Shared memory that each node gives, e.g. 64GiB. Default: 4GiB.")
    ] = None,
    lookup_partitions: Annotated[int | None, typer.Option(help="Number of lookup partitions. Default: 2.")] = None,
    transport: Annotated[str | None, typer.Option(help="auto, nixl or shm. Default: auto.")] = None,
    slab: Annotated[
        str | None, typer.Option(help="Unit in which memory is assigned to block sizes. Default: chosen by the shard.")
    ] = None,
    config: Config = None,
    settings: Set = None,
    address: Address = None,
    no_ray: Annotated[bool, typer.Option("--no-ray", help="Run one node in the foreground, without Ray.")] = False,
) -> None:
    """Start the service on every node of a Ray cluster, or with --no-ray in this process."""
    from kvservice.cli import lifecycle
    from kvservice.cli.settings import load

    sizes = {"pool_bytes": pool, "lookup_partitions": lookup_partitions, "slab_bytes": slab}
    loaded = load(config, settings, service=service, transport=transport, **sizes)
    lifecycle.run_foreground(loaded) if no_ray else lifecycle.up(loaded, address)


@app.command()
@reports_errors
def down(service: Service = None, address: Address = None) -> None:
    """Stop the service and remove everything it made. Blocks in shared memory are lost."""
    from kvservice.cli import lifecycle
    from kvservice.config import load_config

    found = lifecycle.down(load_config(service=service).service, address)
    if not found:
        raise typer.Exit(EXIT_NO_SERVICE)


@app.command()
@reports_errors
def status(service: Service = None, as_json: Json = False) -> None:
    """Show nodes, capacity by slot state, hits, bytes moved and lookup partitions. Run it on any node of the
    service."""
    from kvservice.cli import status as command
    from kvservice.cli.members import chosen_service, unknown_service

    name = chosen_service(service)
    state = command.collect(name)
    if state is None:
        typer.echo('{"service": null}' if as_json else unknown_service(name))
        raise typer.Exit(EXIT_NO_SERVICE)
    command.show(state, as_json=as_json)
    if state["problems"]:
        raise typer.Exit(EXIT_PROBLEM)


@app.command()
@reports_errors
def drain(
    service: Service = None,
    node: Annotated[
        str | None, typer.Option(help="Node whose shard leaves; the beginning of its name is enough.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="All shards of this machine leave.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds until the shard ends, even if blocks are left.")] = 30.0,
    no_handover: Annotated[bool, typer.Option("--no-handover", help="Leave without handing blocks over.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Cancel a drain that is handing blocks over.")] = False,
    as_json: Json = False,
) -> None:
    """Make a shard leave: it hands its hottest blocks to other nodes, tells the directory, and ends. Engines go on."""
    from kvservice.cli import drain as command
    from kvservice.cli.members import chosen_service

    seconds = command.check_timeout(timeout)
    name = chosen_service(service)
    left = command.run(name, node, local, seconds, not no_handover, undo, as_json)
    if not left:
        raise typer.Exit(EXIT_PROBLEM)


@app.command()
@reports_errors
def explain(request_id: str, service: Service = None, as_json: Json = False) -> None:
    """Explain why a request hit what it hit. REQUEST_ID is the id that the API returned, or its beginning."""
    from kvservice.cli import explain as command
    from kvservice.cli.members import chosen_service

    known = command.run(chosen_service(service), request_id, as_json=as_json)
    if not known:
        raise typer.Exit(EXIT_PROBLEM)


@app.command()
@reports_errors
def shard(
    node: Annotated[str, typer.Option(envvar="KVSERVICE_NODE", help="Name of this machine, unique in the service.")],
    host: Annotated[
        str, typer.Option(help="Address on which this node listens and which it gives to other nodes.")
    ] = LOOPBACK,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port for other nodes. 0: any free one; on loopback without TLS a Unix socket."
        ),
    ] = 0,
    lookup_at: Annotated[
        list[str] | None,
        typer.Option("--lookup", help="host:port or unix:/path of a lookup partition. Repeat for all, in their order."),
    ] = None,
    service: Service = None,
    pool: Annotated[str | None, typer.Option(help="Shared memory for blocks, e.g. 64GiB. Default: 4GiB.")] = None,
    config: Config = None,
    settings: Set = None,
    segment_dir: Annotated[
        Path, typer.Option(help="Folder in memory for the pool; engines need the same path.")
    ] = DEV_SHM,
    keep_blocks: Annotated[
        bool, typer.Option("--keep-blocks", help="Keep the blocks in memory for the next start on this machine.")
    ] = False,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that readers get to finish after SIGTERM.")] = 20.0,
    json_logs: JsonLogs = False,
) -> None:
    """Run this machine's part of a service without Ray, in the foreground. SIGTERM drains it and ends it."""
    from kvservice.cli import processes
    from kvservice.cli.settings import load
    from kvservice.observe import logs

    logs.configure(json_lines=json_logs)
    loaded = load(config, settings, service=service, pool_bytes=pool, lookup_addresses=lookup_at or None)
    processes.run_shard(loaded, node, host, port, segment_dir.absolute(), keep_blocks=keep_blocks, grace_seconds=grace)


@app.command()
@reports_errors
def lookup(
    partition: Annotated[int, typer.Option(min=0, help="Number of this lookup partition, from 0.")] = 0,
    lookup_partitions: Annotated[int | None, typer.Option(help="Number of lookup partitions. Default: 2.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port. 0: any free one, printed at start. Default: 7400; on loopback without TLS a Unix socket.",
        ),
    ] = None,
    service: Service = None,
    config: Config = None,
    settings: Set = None,
    json_logs: JsonLogs = False,
) -> None:
    """Run one lookup partition of a service without Ray, in the foreground, until SIGTERM."""
    from kvservice.cli import processes
    from kvservice.cli.settings import load
    from kvservice.observe import logs

    logs.configure(json_lines=json_logs)
    loaded = load(config, settings, service=service, lookup_partitions=lookup_partitions)
    processes.run_lookup(loaded, partition, host, port)


@app.command(name="copy-worker")
@reports_errors
def copy_worker(
    node: Annotated[str, typer.Option(envvar="KVSERVICE_NODE", help="Name of this machine: that of its shard.")],
    device: Annotated[str, typer.Option(help="cpu, or a GPU: its UUID, or its index here.")] = "cpu",
    service: Annotated[str, typer.Option(envvar="KVSERVICE_SERVICE", help="Name of the installation.")] = "default",
    wedge_seconds: Annotated[float, typer.Option(min=0.1, help="A copy that takes longer hangs.")] = 10.0,
    json_logs: JsonLogs = False,
) -> None:
    """A copy worker for engines of this machine, in the foreground, until SIGTERM.

    Ends with 3 when a copy hangs, and with 4 when it cannot use its GPU any more: then start it again."""
    from kvservice.copying.process import run
    from kvservice.copying.worker.server import CopyWorkerConfig
    from kvservice.observe import logs
    from kvservice.units import NodeId

    logs.configure(json_lines=json_logs)
    raise typer.Exit(run(CopyWorkerConfig(service, NodeId(node), wedge_seconds=wedge_seconds), device))


@app.command(name="settings")
def show_settings(as_json: Json = False) -> None:
    """List every setting: what it does, which values it takes, and its default."""
    from kvservice.cli import settings as command

    command.show(as_json=as_json)


@app.command()
@reports_errors
def check(
    lookup_at: Annotated[
        list[str] | None,
        typer.Option("--lookup", help="host:port or unix:/path of a lookup partition; repeat, in their order."),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="host:port of shards' metrics; every address of the name is asked. Repeat for more."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=0, help="Number of cache shards that must answer.")] = 1,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to keep asking until nothing is wrong.")] = 0.0,
) -> None:
    """Ask every part of a service, from anywhere, whether it is there. Exits with 1 and the reasons if one is not."""
    from kvservice.cli import check as command

    problems, seen = command.run(lookup_at or [], metrics or [], nodes, wait)
    for problem in problems:
        typer.secho(f"problem: {problem}", err=True, fg="red")
    typer.echo(seen)
    if problems:
        raise typer.Exit(EXIT_PROBLEM)


@app.command()
@reports_errors
def certs(
    directory: Annotated[Path, typer.Argument(help="Folder to create; KVSERVICE_TLS_DIR names it.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days that the certificate is valid.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Make a new certificate with the CA that is in the folder.")
    ] = False,
    role: Annotated[
        str, typer.Option(help="node: may do everything. client: may only ask, for routers and commands.")
    ] = "node",
    node: Annotated[
        list[str] | None, typer.Option(help="Restrict the certificate to this node. Repeat for more.")
    ] = None,
    address: Annotated[
        list[str] | None, typer.Option(help="Restrict it to shards at this address. Repeat for more.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="Folder of the CA that signs. Default: a new CA is made.")] = None,
) -> None:
    """Make a CA and a certificate for TLS between nodes, or a certificate of one node or client."""
    from kvservice.cli import certs as command

    if role not in ("node", "client"):
        raise ConfigError(f"role is {role!r}; choose node or client", key="role")
    owner = command.Owner(role == "client", tuple(node or ()), tuple(address or ()))
    given = owner if owner != command.Owner() or not renew else None
    typer.echo(command.run(directory, days, renew=renew, owner=given, ca=ca))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this machine: versions, shared memory, NIXL, hashing, reachability, clocks."""
    from kvservice.cli import doctor as command

    checks = command.run_checks()
    command.show(checks, as_json=as_json)
    if not command.healthy(checks):
        raise typer.Exit(EXIT_PROBLEM)


@app.command()
@reports_errors
def demo() -> None:
    """See one remote hit on this machine, in seconds. It runs two cache shards, needs no engine and no model, and
    leaves nothing behind."""
    from kvservice.cli import demo as command

    command.run()


@app.command()
@reports_errors
def proxy(
    decode: Annotated[list[str], typer.Option(help="Decode server, e.g. http://host:8000. Repeat for more.")],
    prefill: Annotated[list[str] | None, typer.Option(help="Prefill server. Repeat for more.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. 0: any free one, named in the log.")] = 8080,
    min_prefill_chars: Annotated[int, typer.Option(help="Prompts with fewer characters go straight to decode.")] = 512,
    in_flight: Annotated[int, typer.Option(help="Most requests under way to one server.")] = 256,
    tries: Annotated[int, typer.Option(min=1, help="Number of servers that one request may fail on.")] = 2,
    max_body: Annotated[str, typer.Option(help="Largest request body.")] = "32MiB",
    connect_timeout: Annotated[float, typer.Option(help="Seconds to connect to a server.")] = 5.0,
    prefill_timeout: Annotated[
        float, typer.Option(help="Seconds for a prefill; then another server is tried.")
    ] = 120.0,
    timeout: Annotated[float, typer.Option(help="Seconds for a whole request.")] = 900.0,
    check_interval: Annotated[float, typer.Option(help="Seconds between health checks of a server.")] = 5.0,
    grace: Annotated[float, typer.Option(help="Seconds that requests under way get after SIGTERM.")] = 30.0,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="KVSERVICE_PROXY_API_KEY", help="Key for the proxy's own probes; clients send their own."),
    ] = None,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Write logs as one JSON object a line.")] = False,
) -> None:
    """Serve one OpenAI API in front of separate vLLM servers for prefill and decode, without Ray Serve."""
    from kvservice.observe import logs

    try:
        from kvservice.proxy.server import run
        from kvservice.proxy.settings import parse_settings
    except ModuleNotFoundError as error:
        raise fail(ConfigError(f"the proxy needs {error.name}; pip install 'kvservice[proxy]'")) from error

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
        )
    )


@app.command()
def sim(
    seed: Annotated[
        int, typer.Option(help="Number of the schedule. The same number always plays the same events.")
    ] = 0,
    count: Annotated[
        int, typer.Option(min=1, help="Number of schedules to play, from --seed on, until one fails.")
    ] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Worker processes when --count > 1.")] = 2,
    whole: Annotated[bool, typer.Option("--whole", help="Show a failing schedule whole, without reducing it.")] = False,
) -> None:
    """Play random faults against the real core under simulated time, network and memory."""
    from kvservice.cli import simulate

    good = simulate.campaign(seed, count, processes) if count > 1 else simulate.tell(seed, whole=whole)
    raise typer.Exit(0 if good else EXIT_PROBLEM)


@app.command(epilog="Example: kvservice replay trace.jsonl --nodes 8 --capacity 10000 --plot replay.png")
@reports_errors
def replay(
    trace: Annotated[Path, typer.Argument(help="JSON lines: timestamp, input_length, output_length, hash_ids.")],
    nodes: Annotated[
        int, typer.Option(min=1, max=256, help="Also simulate this capacity split over N nodes (1 = skip).")
    ] = 8,
    capacity: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Capacity of all nodes, in blocks. Repeat for more. Default: six values."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="reuse, lru, plain-lru, s3-fifo or belady. Repeat for more.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Play only the first N requests.")] = None,
    warm_up: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the requests that is not counted.")] = 0.0,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Also draw a plot into this .png, .svg or .pdf file.")] = None,
    as_json: Json = False,
) -> None:
    """Show what the cache would have found of a request trace, with real eviction, directory and routing on simulated
    nodes."""
    from kvservice.cli import replay as command

    command.replay(
        trace,
        nodes=nodes,
        capacities=sorted(set(capacity or [])),
        policies=policy or [],
        limit=limit,
        warm_up=warm_up,
        processes=processes,
        plot=plot,
        as_json=as_json,
    )


if __name__ == "__main__":
    app()
