"""`python -m kvservice` is the command `kvservice`."""

from kvservice.cli.main import app

if __name__ == "__main__":
    app(prog_name="kvservice")
