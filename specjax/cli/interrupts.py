"""Ctrl-C ends the command with exit code 130, even if a library swallows it."""

from __future__ import annotations

import os
import signal
import sys
import threading

EXIT_CODE = 130
GRACE_SECONDS = 5.0  # for removing partial output


def install() -> None:
    """Handles Ctrl-C from here on, unless this process was started to ignore it.

    The first one raises KeyboardInterrupt. A library may swallow that, so a command that still runs
    after `GRACE_SECONDS`, or at a second Ctrl-C, is ended at once.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def _handle(signum, frame) -> None:
    signal.signal(signal.SIGINT, lambda signum, frame: exit_now())
    timer = threading.Timer(GRACE_SECONDS, exit_now)
    timer.daemon = True
    timer.start()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - interrupted threads print errors
    raise KeyboardInterrupt


def exit_now(code: int = EXIT_CODE) -> None:
    """Ends the process without Python's shutdown.

    Shutdown would destroy programs that XLA is still compiling, and crash.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, RuntimeError):
            continue
    os._exit(code)
