"""`edgekv doctor` names what works and why the rest does not, on any machine, however broken."""

import json

import onnxruntime
import pytest
from click.testing import CliRunner

from edgekv.cli import doctor
from edgekv.errors import UserError


def findings(**how) -> tuple[int, dict[str, dict]]:
    done = CliRunner().invoke(doctor.command, ["--json"], **how)
    return done.exit_code, {f["topic"]: f for f in json.loads(done.output)}


def test_this_machine():
    code, found = findings()
    assert code == 0 and list(found) == [topic for topic, _ in doctor.CHECKS]
    assert found["native library"]["works"] and onnxruntime.__version__ in found["ONNX Runtime"]["detail"]
    assert found["export"]["works"] is True
    assert "GB" in found["memory"]["detail"]
    text = CliRunner().invoke(doctor.command, [])
    assert text.exit_code == 0 and len(text.output.splitlines()) == len(found)


def test_every_no_says_why():
    _, found = findings()
    for finding in found.values():
        if finding["works"] is False:
            assert len(finding["detail"]) > 15, finding


@pytest.mark.parametrize(("error", "shown"), [(UserError("the library is missing; build it."), "the library is missing; build it."), (OSError("no access"), "OSError: no access")])
def test_a_broken_part_is_a_finding_and_the_rest_goes_on(monkeypatch, error, shown):
    def broken():
        raise error

    monkeypatch.setattr(doctor, "CHECKS", tuple((t, broken if t == "native library" else c) for t, c in doctor.CHECKS))
    code, found = findings()
    assert code == 1 and found["native library"] == {"topic": "native library", "works": False, "detail": shown}
    assert found["ONNX Runtime"]["works"] is True


def test_a_jetson_is_described(monkeypatch):
    """With the facts a device would give in place of the missing GPU."""
    info = {
        "count": 1, "name": "Orin", "sm": 87, "multiprocessors": 8, "l2_bytes": 2 << 20, "persisting_l2_bytes": 3 << 19,
        "window_bytes": 128 << 20, "memory_bytes": 7990 << 20, "free_bytes": 5 << 30, "integrated": 1, "driver": 12060, "runtime": 12060,
    }  # fmt: skip
    monkeypatch.setattr("edgekv.engine.device.Device.__init__", lambda self: None)
    monkeypatch.setattr("edgekv.engine.device.Device.info", lambda self: info)
    works, detail = doctor._gpu()
    assert works and "compute capability 8.7" in detail and "1536 KiB of it can be set aside" in detail and "driver 12.6" in detail
    monkeypatch.setattr("edgekv.engine.device.Device.info", lambda self: {"count": 0, "reason": "driver too old"})
    assert doctor._gpu() == (False, "driver too old")
