"""Every architecture, exported in single precision, must give transformers' logits token by token while the cache holds the text."""

import numpy as np
import pytest
import tiny_models

from edgekv.engine.onnxruntime import OnnxRuntimeEngine
from edgekv.export import exporter
from edgekv.generation.session import Session
from edgekv.policy import CachePolicy, parse_budget

TEXT = 120


def export(source, target, keep="full", budget=None, **options):
    policy = CachePolicy(keep=keep, element="fp32", boundary=32, **options.pop("policy", {}))
    made = exporter.Options(policy, parse_budget(budget) if budget else None, weights="fp32", check_parity=False, **options)
    return exporter.export(str(source), target, made)


def logits(bundle, ids, blocks=(13, 1, 7, 32, 1)):
    """float32 [T, vocab]: prefill in blocks of several lengths, single tokens among them."""
    engine = OnnxRuntimeEngine(bundle, threads=1, max_rows=32)
    try:
        session, parts, done = Session(engine), [], 0
        while done < ids.size:
            block = ids[done : done + min(session.room, blocks[len(parts) % len(blocks)])]
            parts.append(session.step(block).copy())
            session.commit(block.size)
            done += block.size
        return np.concatenate(parts)
    finally:
        engine.close()


@pytest.mark.parametrize("name", sorted(tiny_models.MODELS.keys() - {"phi3-longrope"}))  # test_parity.py has that one
def test_pain_21_logits_equal_transformers(name, tmp_path):
    source = tiny_models.make(tmp_path / "model", name)
    bundle = export(source, tmp_path / "bundle")
    ids = tiny_models.random_text(TEXT)
    want = tiny_models.expected(source, ids)
    got = logits(bundle, ids)
    assert np.ptp(want) > 1.0, "the model is too quiet to tell anything"
    assert np.abs(got - want).max() <= 1e-3
