"""The `entasis` command, also as `python -m entasis`."""

from __future__ import annotations

import signal
import sys


def run() -> None:
    """Entry point. The command line is imported inside, so that Ctrl-C and a scheduler's signal have one line
    from the first moment on."""
    try:
        from entasis.train.interrupt import leaving_on_signals

        with leaving_on_signals():
            from entasis.cli.main import run_command

            status = run_command(sys.argv[1:])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second one must not cut the line short
        print("error: interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    run()
