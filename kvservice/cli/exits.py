"""How a command ends: the exit codes, and how an error is told.

0 is good. A script can tell by the other codes whether to look (1), to correct its call (2), to start a service (3) or
to get other credentials (4). docs/reference/errors.md has the table, made from `MEANINGS`.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import ParamSpec

import typer

from kvservice.cli.extras import missing_extra
from kvservice.errors import ConfigError, Forbidden, KVServiceError, NoService, Unauthenticated


class ExitCode(IntEnum):
    GOOD = 0
    PROBLEM = 1  # also what Python ends with after an exception
    USAGE = 2  # as most commands have it
    NO_SERVICE = 3
    DENIED = 4
    COPY_HANGS = 5
    DEVICE_LOST = 6
    INTERRUPTED = 130  # 128 and the number of the signal, as shells have it


MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.GOOD: "All is well, or what you asked for is done.",
    ExitCode.PROBLEM: "Something is wrong. The output says what.",
    ExitCode.USAGE: "An option, an argument or a setting is wrong, or an extra is not installed. Nothing was done.",
    ExitCode.NO_SERVICE: "There is no such service, or none of its parts answers. Start it, or name another one.",
    ExitCode.DENIED: "The service refused your certificate or token.",
    ExitCode.COPY_HANGS: "Only `kvservice copy-worker`: a copy hangs. Start it again.",
    ExitCode.DEVICE_LOST: "Only `kvservice copy-worker`: it cannot use its GPU any more. Start it again.",
    ExitCode.INTERRUPTED: "Ctrl-C ended the command before it was done.",
}

P = ParamSpec("P")


def code_of(error: KVServiceError) -> ExitCode:
    match error:
        case NoService():
            return ExitCode.NO_SERVICE
        case ConfigError():
            return ExitCode.USAGE
        case Unauthenticated() | Forbidden():
            return ExitCode.DENIED
    return ExitCode.PROBLEM


def say_wrong(text: str) -> None:
    """Print it to stderr, on a terminal in red unless the user wants no colours (https://no-color.org)."""
    typer.echo(text if os.environ.get("NO_COLOR") else typer.style(text, fg="red"), err=True)


def fail(error: KVServiceError) -> typer.Exit:
    """Print the error for people, or log it where logs are JSON. Returns the exception that ends the command."""
    from kvservice.observe import logs

    if not logs.say_error(error.message):
        say_wrong(f"error: {error.message}")
    return typer.Exit(code_of(error))


def reports_errors(command: Callable[P, object]) -> Callable[P, None]:
    """Make a command tell a KVServiceError, a missing extra or Ctrl-C in one line and exit with its code, instead of a
    traceback."""

    @functools.wraps(command)
    def reporting(*arguments: P.args, **options: P.kwargs) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `kvservice.__main__` leaves it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            command(*arguments, **options)
        except KVServiceError as error:
            raise fail(error) from error
        except ModuleNotFoundError as error:
            told = missing_extra(error)
            if told is None:
                raise
            raise fail(told) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(ExitCode.INTERRUPTED) from error

    return reporting
