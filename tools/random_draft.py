"""Makes a useless draft: a model with random weights and the tokenizer of a bundle, to show what drafting in vain costs.

    python tools/random_draft.py TARGET -o useless --layers 6 --hidden 576
    python tools/bench_speculation.py TARGET --draft useless --task code --gammas ""
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from edgekv import bundle

_HEAD = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=576, help="a multiple of 64")
    parser.add_argument("--kv-budget", default="1024tok")
    arguments = parser.parse_args()
    target = bundle.open_bundle(arguments.target, verify=False)
    heads = arguments.hidden // _HEAD
    config = LlamaConfig(
        vocab_size=target.model["vocab"], hidden_size=arguments.hidden, intermediate_size=arguments.hidden * 8 // 3,
        num_hidden_layers=arguments.layers, num_attention_heads=heads, num_key_value_heads=next(n for n in (3, 2, 1) if heads % n == 0),
        max_position_embeddings=target.model["context"], eos_token_id=target.model["eos_token_ids"], tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        shutil.copy(target.file("tokenizer.json"), folder)
        command = ["export", folder, "-o", str(arguments.output), "--keep", "window", "--positions", "cache", "--no-parity"]
        sys.exit(subprocess.call([sys.executable, "-m", "edgekv", *command, "--kv-budget", arguments.kv_budget]))


if __name__ == "__main__":
    main()
