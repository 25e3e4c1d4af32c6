"""The `edgekv` command: one file per sub-command in this folder, each with a click command named `command`.

Files are imported only when their command is asked for, so that `edgekv run` never pays for what `edgekv export` needs.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import sys
from typing import Any

import click

from edgekv import __version__
from edgekv.errors import EdgekvError, UserError

INTERRUPTED = 130  # the shell's own convention: 128 + SIGINT


class LazyGroup(click.Group):
    """Finds commands by file name and turns edgekv's own errors into one sentence and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = (module.name for module in pkgutil.iter_modules(__path__))
        return sorted(name.replace("_", "-") for name in names if not name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        try:
            return importlib.import_module(f"{__name__}.{cmd_name.replace('-', '_')}").command
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "edgekv":
                raise
            extra = "pip install 'edgekv[export]'" if cmd_name in ("export", "finetune") else "pip install --force-reinstall edgekv"
            raise UserError(f"`edgekv {cmd_name}` needs the Python package {error.name!r}: {extra}.") from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of our output (head, less) has left: no error of ours, and nobody to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails again
            return None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        interrupts: list[int] = []

        def interrupt(number: int, frame: Any) -> None:
            interrupts.append(number)
            signal.default_int_handler(number, frame)

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
        try:
            result = super().main(*args, **{**kwargs, "standalone_mode": False})
            code = result if isinstance(result, int) else 0
        except click.exceptions.Exit as stop:
            code = stop.exit_code
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        except (EdgekvError, OSError) as error:
            code = INTERRUPTED if interrupts else 2  # a library that is interrupted may fail in a way of its own
            if not interrupts:
                click.echo(f"edgekv: {_sentence(error)}", err=True)
        finally:
            if signal.getsignal(signal.SIGINT) is interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(code)


def _sentence(error: EdgekvError | OSError) -> str:
    """What went wrong; of the system's errors, such as a name too long or a full disk, with the file."""
    if isinstance(error, EdgekvError):
        return str(error)
    at = f" ({str(error.filename)[:200]})" if error.filename else ""
    return f"The system refuses a file: {error.strerror or error}{at}."


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, package_name="edgekv")
def main() -> None:
    """Runs language models inside a fixed key/value cache budget."""
