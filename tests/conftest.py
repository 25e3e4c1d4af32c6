"""Shared by all tests. Pytest puts this folder on the path, so tests may import the helpers beside this file."""

import signal

from hypothesis import settings

# Slow machines must not turn a passing property into a failure; examples are the same on every run.
settings.register_profile("edgekv", deadline=None, derandomize=True)
settings.load_profile("edgekv")


def pytest_configure():
    """Interrupts arrive in the tests and in what they start, also where a shell runs them in the background, which ignores them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
