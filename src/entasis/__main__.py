"""The `entasis` command, also as `python -m entasis`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


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
    if "RANK" in os.environ:
        # One of several ranks leaves without taking the interpreter down: a thread of their exchange that still lets go
        # of a tensor at that moment would abort the process.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
