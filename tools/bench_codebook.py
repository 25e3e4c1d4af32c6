"""Times learning the codebook of compressed keys in one pass against k-means on the same sub-vectors.

    python tools/bench_codebook.py [--tokens 32768] [--dim 128] [--threads 1] [--repeat 3] [--json]

The one pass is the native library's compaction, boundary by boundary, of a layer whose values have 4 numbers, so that next to nothing but
keys is left: mean keys, transform, sign codes, codebook and the records of magnitudes. k-means gets the same transformed keys, without any
of that to do: for each group of 4 numbers 16 centroids and 20 iterations (scikit-learn's KMeans, n_init=1, max_iter=20, tol=0). Shortest of
--repeat runs, taken in turns, one kv head. The error is the share of the keys' energy that is lost when each sub-vector is replaced by its
centroid: a sign code needs no search for the nearest.
scikit-learn is no part of edgekv; this tool alone asks for it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import numpy as np

from edgekv import layout, native
from edgekv.reference.self_index import signs
from edgekv.reference.self_index.transform import hadamard

INTERVAL = 256


def one_pass(params: native.LayerParams, keys: np.ndarray, threads: int) -> tuple[float, np.ndarray]:
    """Seconds that compaction of all keys [tokens, dim] takes, and the codebook it leaves [dim/4, 16, 4]."""
    state, seconds = native.new_state(params), 0.0
    view = layout.StateView({name: getattr(params, name) for name, _ in params._fields_}, state)
    for start in range(0, len(keys), INTERVAL):
        part = keys[None, start : start + INTERVAL]
        layout.write_keys(view.tail_k, 0, part)
        view.tail_v[:] = part[..., :4]
        began = time.perf_counter()
        native.compact(params, state, start + INTERVAL, threads=threads)
        seconds += time.perf_counter() - began
    return seconds, view.codebook[0].copy()


def k_means(x: np.ndarray) -> tuple[float, float]:
    """Seconds that k-means takes for all groups of x [tokens, dim], and what it loses of their energy."""
    from sklearn.cluster import KMeans

    seconds = lost = 0.0
    for group in range(0, x.shape[1], signs.DIMS):
        sub = np.ascontiguousarray(x[:, group : group + signs.DIMS])
        began = time.perf_counter()
        found = KMeans(signs.CODES, n_init=1, max_iter=20, tol=0, random_state=0).fit(sub)
        seconds += time.perf_counter() - began
        lost += found.inertia_
    return seconds, lost / float((x**2).sum())


def measure(args) -> dict:
    rng = np.random.default_rng(0)
    spread = np.exp(rng.standard_normal(args.dim))  # channels of unequal size around means of their own, as keys are
    keys = (spread * (rng.standard_normal((args.tokens, args.dim)) + 2 * rng.standard_normal(args.dim))).astype(np.float16).astype(np.float32)
    means = keys.reshape(-1, INTERVAL, args.dim).mean(1).astype(np.float16).astype(np.float32)
    x = hadamard(keys - np.repeat(means, INTERVAL, axis=0))
    params = native.LayerParams(
        q_heads=1, kv_heads=1, key_dim=args.dim, value_dim=4, body_slots=args.tokens, tail_slots=INTERVAL, scale=args.dim**-0.5,
        format=1, value_bits=2, intervals=args.tokens // INTERVAL,
    )  # fmt: skip
    passed, meant = float("inf"), float("inf")
    for _ in range(args.repeat):
        seconds, codebook = one_pass(params, keys, args.threads)
        passed = min(passed, seconds)
        seconds, k_means_error = k_means(x)
        meant = min(meant, seconds)
    nearest = codebook[np.arange(args.dim // signs.DIMS), signs.sign_codes(x)].reshape(x.shape)
    return {
        "isa": native.isa(), "threads": args.threads, "tokens": args.tokens, "dim": args.dim, "load": os.getloadavg()[0], "compaction_s": passed,
        "k_means_s": meant, "speedup": meant / passed, "error": float(((x - nearest) ** 2).sum() / (x**2).sum()), "k_means_error": k_means_error,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.tokens < INTERVAL or args.tokens % INTERVAL or args.dim < 4 or args.dim % 4:
        sys.exit(f"Tokens come in whole intervals of {INTERVAL} and dimensions in groups of 4.")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read when scikit-learn is loaded
    try:
        import sklearn  # noqa: F401
    except ImportError:
        sys.exit("This tool compares with scikit-learn's k-means and scikit-learn is not installed: pip install scikit-learn")
    report = measure(args)
    if args.json:
        print(json.dumps(report, indent=1))
        return
    print(f"{report['isa']}, {report['threads']} threads, load {report['load']:.1f}; {report['tokens']} tokens of {report['dim']} numbers")
    print(f"{'one pass (compaction of keys)':44} {report['compaction_s']:9.4f} s   error {report['error']:.3f}")
    print(f"{'k-means, 20 iterations':44} {report['k_means_s']:9.4f} s   error {report['k_means_error']:.3f}")
    print(f"one pass is {report['speedup']:.1f} times faster")


if __name__ == "__main__":
    main()
