"""`python -m entasis` is the `entasis` command."""

from entasis.cli.main import run

if __name__ == "__main__":
    run()
