"""Running the command as a person does: another process, with its own standard input, output and exit code."""

import subprocess
import sys

import pytest


@pytest.fixture
def edgekv(tmp_path):
    """edgekv(*arguments, stdin=bytes) -> finished process; standard input is closed unless given."""

    def call(*arguments, stdin=b"", **options):
        command = [sys.executable, "-m", "edgekv", *map(str, arguments)]
        return subprocess.run(command, input=stdin, capture_output=True, timeout=300, **options)

    return call


@pytest.fixture
def refused(edgekv):
    """refused(*arguments) -> the one sentence on standard error of a call that must end with exit code 2."""

    def call(*arguments, **options):
        done = edgekv(*arguments, **options)
        message = done.stderr.decode()
        assert done.returncode == 2, message
        assert "Traceback" not in message and done.stdout == b""
        assert message.startswith("edgekv: ") and message.count("\n") == 1 and message.endswith(".\n"), message
        return message[len("edgekv: ") : -1]

    return call
