"""Limits on the time and memory that a piece of code may take."""

import contextlib
import signal
import tracemalloc


@contextlib.contextmanager
def limits(cpu_seconds=1.0, num_bytes=300e6):
    """Fails if the body takes more processor time, or allocates more at once from Python."""

    fired = []

    def stop(number, frame):
        fired.append(number)
        raise TimeoutError(f"more than {cpu_seconds} s of processor time")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    assert not fired, "the code under test caught the TimeoutError"
    assert peak < num_bytes
