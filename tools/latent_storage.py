"""What keys cost in perplexity as a compressed cache stores them, and what latents of the same or fewer bytes would: a table.

    python tools/latent_storage.py MODEL --calibrate emma.txt --evaluate persuasion.txt [--shares 50 37.5 25] [--bits 4 3 2]

Every key of a text is replaced by what is left of it, but the first 64 tokens and those of the boundary interval (256) that a query is in; all
are attended to. Whole keys are stored as docs/self_index.md says, signs and magnitudes of --magnitudes bits. Latents (docs/thin_keys.md) are
spread by a Hadamard transform in groups of 32, which maps can absorb, and stored with --bits in such groups; 0 stores them exactly. Bytes are
per token and kv head, without sign codes for latents. Each line is one of tools/thin_key_table.py.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import torch
from thin_key_table import compare, losses, read

from edgekv.export.thin import latent, latent_maps, make, ranks
from edgekv.export.thin.rotation import rotated
from edgekv.layout import GROUP
from edgekv.reference.self_index import quantise
from edgekv.reference.self_index.signs import sign_codes, signs_of
from edgekv.reference.self_index.transform import hadamard

SINKS, INTERVAL = 64, 256


def stored(x: np.ndarray, bits: int) -> np.ndarray:
    """float32 [..., n]: what numbers are when they are read again."""
    codes, pairs = quantise.quantise(x, bits)
    return quantise.dequantise(codes, quantise.unbiased(x, codes, pairs), x.shape[-1])


def stored_latents(z: np.ndarray, bits: int) -> np.ndarray:
    """The same of latents [..., r], spread within their groups."""
    groups = np.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % GROUP)]).reshape(*z.shape[:-1], -1, GROUP)
    return hadamard(stored(hadamard(groups).reshape(*z.shape[:-1], -1), bits).reshape(groups.shape)).reshape(*z.shape[:-1], -1)[..., : z.shape[-1]]


@dataclasses.dataclass(frozen=True)
class StoredKeys:
    """Whole keys as signs and magnitudes around the mean of their interval."""

    bits: int
    interval: int = INTERVAL

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = k.clone()
        for begin in range(0, k.shape[-2], INTERVAL):
            part = slice(max(begin, SINKS), begin + INTERVAL)
            keys = k[..., part, :].numpy()
            mean = keys.mean(-2, keepdims=True).astype(np.float16).astype(np.float32)
            spread = hadamard(keys - mean)
            out[..., part, :] = torch.from_numpy(hadamard(signs_of(sign_codes(spread)) * stored(np.abs(spread), self.bits)) + mean)
        return q, out


@dataclasses.dataclass(frozen=True)
class StoredLatents(latent_maps.LatentMaps):
    bits: int = 0

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = (latent_maps.joint(rotated(k, self.geometry, back=True)) - self.mean) @ self.encoder
        z = torch.from_numpy(stored_latents(z.numpy(), self.bits)) if self.bits else z
        apart = (z @ self.decoder + self.mean).unflatten(-1, (k.shape[-3], k.shape[-1])).transpose(-2, -3)
        return q, torch.cat([k[..., :SINKS, :], rotated(apart, self.geometry)[..., SINKS:, :]], -2)


def key_bytes(count: int, bits: int) -> float:
    return count * bits / 8 + -(-count // GROUP) * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibrate", required=True, type=Path)
    parser.add_argument("--evaluate", required=True, type=Path)
    parser.add_argument("--magnitudes", nargs="*", type=int, default=[2, 1], help="bits beside the sign of a whole key's number")
    parser.add_argument("--shares", nargs="*", type=float, default=[50, 37.5, 25])
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3, 2])
    parser.add_argument("--tokens", type=int, default=make.TOKENS, help="of the calibration text")
    parser.add_argument("--steps", type=int, default=make.STEPS, help="of the refinement of latent maps")
    parser.add_argument("--chunks", type=int, default=2, help="evaluated pieces of --length tokens")
    parser.add_argument("--length", type=int, default=1024)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, geometry, context, text, pieces = read(given)
    full = losses(model, pieces, {}, 0)
    print(f"full keys: perplexity {full[0].mean().exp():.2f}", flush=True)

    def tell(name: str, maps: list) -> None:
        print(f"{name:46} {compare(full, losses(model, pieces, dict(enumerate(maps)), 0))}", flush=True)

    heads, dim = geometry[0].kv_heads, geometry[0].key_dim
    for bits in given.magnitudes:
        tell(f"whole keys, sign + {bits} bits, {dim / 8 + key_bytes(dim, bits):g} bytes", [StoredKeys(bits)] * len(geometry))
    for share in given.shares:
        fitted = make.from_chunks(model, text, geometry, ranks.KeyRank(share=share / 100), "latent", given.steps, context, lambda *_: None)
        for bits in given.bits:
            size = f"{key_bytes(fitted.maps[0].rank, bits) / heads:.1f} bytes" if bits else "exact"
            tell(f"latents of {share:g} %, {bits} bits, {size}", [StoredLatents(m.encoder, m.decoder, m.mean, m.geometry, 0, INTERVAL, bits) for m in fitted.maps])


if __name__ == "__main__":
    main()
