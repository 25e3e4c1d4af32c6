"""The benchmark of a decode step with thin keys calls the library directly, so a change of that call must not leave it behind."""

import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "bench_thin_keys.py"


def test_the_benchmark_of_thin_keys_runs():
    options = ["--runs", "1", "--depths", "64", "--ranks", "32", "--latent", "96", "--bytes", "1"]
    done = subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\d us", done.stdout)) == 4  # whole, projected, pairs, latent
