"""tools/on_device.sh with stand-ins for the commands it runs: its own logic, not the hardware's answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_bundle import make

ROOT = Path(__file__).resolve().parents[2]
COUNTERS = '''==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","void edgekv::cuda::attend<__half, 1, 1, false>(edgekv::cuda::Step)","lts__t_sectors_op_read_lookup_miss.sum","sector","1,000"
"0","void edgekv::cuda::attend<__half, 1, 1, false>(edgekv::cuda::Step)","lts__t_sectors_evict_last_lookup_hit.sum","sector","n/a"
"1","void edgekv::cuda::attend<__half, 1, 1, false>(edgekv::cuda::Step)","lts__t_sectors_op_read_lookup_miss.sum","sector","24"
"1","edgekv::cuda::combine(edgekv::cuda::Step)","lts__t_sectors_op_read_lookup_miss.sum","sector","nan"
"1","edgekv::cuda::combine(edgekv::cuda::Step)","gpu__time_duration.sum","ns","2048"
'''


@pytest.fixture
def place(tmp_path):
    """A bundle and fake commands; FAIL names the sub-command that fails."""
    make(tmp_path / "bundle")
    edgekv = tmp_path / "edgekv"
    edgekv.write_text(
        '#!/bin/sh\n[ "$1" = "${FAIL:-}" ] && { echo "edgekv: it does not work" >&2; exit 2; }\n'
        'case "$1" in build) echo "built" ;; *) echo "{\\"command\\": \\"$*\\"}" ;; esac\n'
    )
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$1" in *build_plugin.py) [ "${{FAIL:-}}" = plugin ] && exit 1; echo library ;; *) exec {sys.executable} "$@" ;; esac\n'
    )
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\ncat <<'END'\n{COUNTERS}END\n")
    for script in (edgekv, python, ncu):
        script.chmod(0o755)
    return tmp_path


def run(place, fail="", ncu="ncu") -> tuple[int, dict]:
    environment = os.environ | {"EDGEKV": str(place / "edgekv"), "PYTHON": str(place / "python"), "NCU": str(place / ncu), "FAIL": fail}
    done = subprocess.run(
        [str(ROOT / "tools/on_device.sh"), str(place / "bundle"), str(place / "out.json")], env=environment, capture_output=True, text=True
    )
    return done.returncode, json.loads((place / "out.json").read_text())


def test_everything_runs_in_order_and_lands_in_one_file(place):
    code, report = run(place)
    assert code == 0
    assert list(report["steps"]) == ["doctor", "plugin", "build", "verify", "bench_tensorrt", "counters", "bench_onnxruntime"]
    assert all(s["exit_code"] == 0 and s["seconds"] >= 0 for s in report["steps"].values())
    assert "--engine tensorrt" in report["steps"]["bench_tensorrt"]["result"]["command"]
    assert report["bundle"]["model"]["name"] == "tiny" and report["machine"]
    kernels = report["steps"]["counters"]["result"]
    assert kernels["attend"] == {"lts__t_sectors_op_read_lookup_miss.sum": 1024.0, "dram_read_bytes": 32768.0}
    assert kernels["combine"] == {"gpu__time_duration.sum": 2048.0}  # what the device lacks is left out, not zero


def test_a_failure_is_recorded_and_what_does_not_depend_on_it_goes_on(place):
    code, report = run(place, fail="build")
    steps = report["steps"]
    assert code == 1 and steps["build"]["exit_code"] == 2 and "does not work" in steps["build"]["errors"]
    assert steps["verify"] == {"left_out": "there is no engine"} and steps["bench_onnxruntime"]["exit_code"] == 0
    code, report = run(place, fail="plugin")
    assert code == 1 and report["steps"]["build"] == {"left_out": "there is no plugin library"}


def test_a_missing_profiler_is_no_failure(place):
    code, report = run(place, ncu="nowhere")
    assert code == 0 and "not installed" in report["steps"]["counters"]["left_out"]


def test_not_a_bundle(tmp_path):
    done = subprocess.run([str(ROOT / "tools/on_device.sh"), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "is not a bundle" in done.stderr
