"""Exporting needs memory for the largest layer, not for the model: weights stream from the checkpoint into the bundle."""

import json
import subprocess
import sys

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

HIDDEN, INNER = 768, 3072
LAYER_BYTES = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)  # in single precision
PROGRAM = r"""
import json, re, sys
from pathlib import Path
from edgekv.export import exporter
from edgekv.policy import CachePolicy
made = exporter.export(sys.argv[1], Path(sys.argv[2]), exporter.Options(CachePolicy(), None, sys.argv[3], check_parity=False))
peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())  # ru_maxrss would start at the parent's size
print(json.dumps({"peak": int(peak.group(1)) * 1024, "bytes": made.weight_bytes}))
"""


def peak(folder, layers, weights):
    """Peak resident bytes of an export process, and bytes of weights in the bundle."""
    source = folder / f"{layers}"
    if not source.exists():
        config = LlamaConfig(**{**tiny_models.SHAPE, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
                                "num_attention_heads": 12, "num_key_value_heads": 12})  # fmt: skip
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = model.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        tiny_models.save(source, model)
    command = [sys.executable, "-c", PROGRAM, str(source), str(folder / f"{layers}-{weights}"), weights]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("weights", ["fp32", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_peak_does_not_grow_with_the_number_of_layers(weights, tmp_path):
    few, many = peak(tmp_path, 2, weights), peak(tmp_path, 8, weights)
    assert many["bytes"] - few["bytes"] > 5.9 * LAYER_BYTES * (1 if weights == "fp32" else 1 / 8)
    assert many["peak"] - few["peak"] < 2 * LAYER_BYTES
