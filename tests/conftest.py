"""Shared by all tests. Pytest puts this folder on the path, so tests may import the helpers beside this file."""

import os
import signal

from hypothesis import settings

# Slow machines must not turn a passing property into a failure; examples are the same on every run.
settings.register_profile("edgekv", deadline=None, derandomize=True)
settings.load_profile("edgekv")


def pytest_configure(config):
    """Interrupts arrive in the tests and in what they start, also where a shell runs them in the background, which ignores them.

    Tests that run side by side keep to one processor each: a thread pool that waits by spinning would take the others' time.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(config.workerinput["workerid"][2:]) % len(cores)]})
