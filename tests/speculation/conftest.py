"""The command as a process, for the tests of this folder."""

from running import edgekv, refused  # noqa: F401
