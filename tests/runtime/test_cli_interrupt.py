"""Ctrl-C ends a command as an interrupt, however the library that was running reports it."""

import os
import signal
import time

import click
import pytest

from edgekv import cli
from edgekv.errors import UserError


@pytest.mark.parametrize("interrupted,code", [(True, 130), (False, 2)])
def test_an_error_that_an_interrupt_caused_is_an_interrupt(monkeypatch, capsys, interrupted, code):
    @click.command()
    def fails():
        try:
            if interrupted:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
        except KeyboardInterrupt:
            pass
        raise UserError("This failed.")

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: fails)
    with pytest.raises(SystemExit) as end:
        cli.main(["fails"])
    assert end.value.code == code
    assert ("This failed." in capsys.readouterr().err) != interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
