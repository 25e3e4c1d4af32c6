"""One pool of threads for engines that take turns. In processes of its own: a pool cannot be taken back."""

import subprocess
import sys
import textwrap

PROGRAM = """
import os, sys
sys.path[:0] = {path!r}
import numpy as np
import tiny_bundle
from pathlib import Path
from edgekv import engine
from edgekv.engine import pool
from edgekv.generation.session import Session

made = [tiny_bundle.make(Path({folder!r}) / name) for name in "ab"]
if {shared}:
    pool.share(2)
loaded, logits, threads = [], [], []
for bundle in made:
    loaded.append(engine.load(bundle, threads=3))
    logits.append(Session(loaded[-1]).feed(list(range(1, 40))).copy())
    threads.append(len(os.listdir("/proc/self/task")))
assert (logits[0] == logits[1]).all()
print(threads[1] - threads[0], [one.threads for one in loaded])
"""


def run(tmp_path, shared):
    folder = tmp_path / str(shared)
    folder.mkdir()
    source = textwrap.dedent(PROGRAM).format(path=sys.path, folder=str(folder), shared=shared)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    threads, sizes = done.stdout.split(" ", 1)
    return int(threads), sizes.strip()


def test_engines_share_the_threads_of_the_process(tmp_path):
    assert run(tmp_path, False) == (2, "[3, 3]")  # two more beside the calling one
    assert run(tmp_path, True) == (0, "[2, 2]")
