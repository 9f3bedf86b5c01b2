"""Where the command `kvservice` begins, and `python -m kvservice`."""

import signal


def main() -> None:
    """Run the command line. Until a command runs nothing has to be undone, so Ctrl-C ends the process at once;
    otherwise it would end an import with a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvservice.cli.main import app

    app(prog_name="kvservice")


if __name__ == "__main__":
    main()
