"""What continuous integration does about the TensorRT tests: left out where their tools cannot be had, and counted where they can."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("fetched", "tests", "code", "said"),
    [(3, 0, 0, "was left out"), (0, 0, 0, "test-tensorrt ran"), (0, 2, 2, "test-tensorrt ran"), (1, 0, 0, "test-tensorrt ran")],
)
def test_the_tensorrt_tests_are_left_out_only_where_they_cannot_run(tmp_path, fetched, tests, code, said):
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "python").write_text(f'#!/bin/sh\n[ "$1" = tools/tensorrt_wheels.py ] && exit {fetched}\nexit 9\n')
    (commands / "make").write_text(f'#!/bin/sh\necho "$1 ran"\n[ "$1" = test ] || exit {tests}\n')
    for path in commands.iterdir():
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "VENV": str(tmp_path)}
    done = subprocess.run([str(ROOT / ".ci/run")], env=environment, capture_output=True, text=True)
    assert done.returncode == code and "test ran" in done.stdout and said in done.stdout


def test_a_missing_compiler_is_one_line_and_a_code_of_its_own(tmp_path):
    done = subprocess.run(
        ["/usr/bin/env", "-i", f"PATH={tmp_path}", sys.executable, "-c",
         "import sys, build_plugin; build_plugin.NVCC_PLACES = (); import tensorrt_wheels; tensorrt_wheels.main()"],
        cwd=ROOT / "tools", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "nvcc was not found" in done.stderr
