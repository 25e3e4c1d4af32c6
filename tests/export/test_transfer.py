"""Attention transfer: what is learned from, that it helps, that it never hurts, and that it changes nothing else."""

import numpy as np
import pytest
import torch
from tiny_models import make

from edgekv.export import exporter, load
from edgekv.export.thin import calibrate, ranks, stream, train, trainable, transfer
from edgekv.export.thin.make import from_chunks, load_model, starts_of

CHUNKS = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (2, 48))).repeat(2, 1)  # tiny models learn nothing that holds elsewhere
STEPS = 64


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2", "gptj", "llama latent", "gemma2 latent", "gpt2 latent"])
def made(request, tmp_path_factory):
    """The full model, its geometry, names of what learns, and maps to half of the numbers to begin with."""
    name, form = [*request.param.split(), "projected"][:2]
    source = load.find(str(make(tmp_path_factory.mktemp(name) / "model", name)))
    model = load_model(source, 128).requires_grad_(False)
    geometry, _ = exporter.whole_geometry(source, 128, lambda stage, done, total: None, form)
    start = from_chunks(model, CHUNKS, geometry, ranks.parse("50%"), form, 0, 128, lambda stage, done, total: None).maps
    return model, geometry, trainable.key_side(model, CHUNKS[0, :8]), start


def learn(made, path, **changes):
    model, geometry, names, start = made
    student = trainable.twin(model, names)
    trainable.only_these(student, names)
    told = []
    transfer.transfer(
        student, model, names, start, CHUNKS, starts_of(CHUNKS, 128), lambda: geometry, changes.get("steps", STEPS), 7, path,
        lambda layer, layers, kl: told.append((layer, layers, kl)), changes.get("stop", lambda step: False),
    )  # fmt: skip
    return student, told


def divergences(model, student, maps):
    """Of every layer: KL of the student's attention from the full model's, of the hidden states that the full model gives it, nats."""
    blocks = stream.blocks(student, CHUNKS[0])
    found = []
    for reading, block, m in zip(stream.readings(model, CHUNKS), blocks, maps, strict=True):
        with torch.no_grad():
            q, k = stream.queries_and_keys(block, reading.hidden[-1], reading.call)
            text = reading.text
            found.append(float(calibrate.divergence(text.scores.logits(text.q[-1], text.k[-1]), text.scores.logits(*m.apply(q, k)))))
    return found


def test_a_block_shows_what_its_attention_sees(made):
    model = made[0]
    for reading, block in zip(stream.readings(model, CHUNKS), stream.blocks(model, CHUNKS[0]), strict=True):
        for chunk in range(len(CHUNKS)):
            q, k = stream.queries_and_keys(block, reading.hidden[chunk], reading.call)
            torch.testing.assert_close(q, reading.text.q[chunk])
            torch.testing.assert_close(k, reading.text.k[chunk])


def test_every_layer_attends_more_like_the_full_model(made, tmp_path):
    model, _, names, start = made
    student, told = learn(made, tmp_path / "t.pt")
    layers = len(start)
    assert [(layer, total) for layer, total, _ in told] == [(i + 1, layers) for i in range(layers)]
    maps = transfer.load(tmp_path / "t.pt", student, start)
    before, after = divergences(model, model, start), divergences(model, student, maps)
    assert all(b <= a for a, b in zip(before, after, strict=True)) and sum(after) < 0.95 * sum(before), (before, after)
    theirs = dict(model.named_parameters())
    changed = {name for name, p in student.named_parameters() if not torch.equal(p, theirs[name])}
    assert changed <= set(names) and bool(changed) == bool(names)
    assert [m.rank for m in maps] == [m.rank for m in start]
    other = trainable.twin(model, names)
    transfer.load(tmp_path / "t.pt", other, start)
    for (name, a), (_, b) in zip(student.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_what_does_not_help_is_taken_back(made, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "RATE", 50.0)
    model, _, names, start = made
    student, _ = learn(made, tmp_path / "t.pt", steps=3)
    for (name, a), (_, b) in zip(student.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(transfer.load(tmp_path / "t.pt", student, start), start, strict=True):
        assert all(map(torch.equal, a.parts(), b.parts()))


def test_a_stopped_transfer_goes_on_bit_for_bit(made, tmp_path):
    model, _, names, start = made
    want, _ = learn(made, tmp_path / "one.pt", steps=4)
    path = tmp_path / "two.pt"
    learn(made, path, steps=4, stop=lambda step: path.exists() and step == 2)  # in layer 1
    assert transfer.load(tmp_path / "two.pt", trainable.twin(model, names), start) is None
    _, told = learn(made, tmp_path / "two.pt", steps=4)
    assert told[0][0] == 2
    got = trainable.twin(model, names)
    for a, b in zip(transfer.load(tmp_path / "one.pt", want, start), transfer.load(tmp_path / "two.pt", got, start), strict=True):
        assert all(map(torch.equal, a.parts(), b.parts()))
    for (name, a), (_, b) in zip(want.named_parameters(), got.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("rows", "length", "steps"), [(1000, 512, 400), (1000, 64, 400), (3, 512, 400), (2, 32, 1), (5000, 2048, 1)])
def test_as_much_text_as_the_steps_can_read(rows, length, steps):
    chunks = transfer.chunks_for(torch.arange(rows)[:, None].expand(rows, length), steps)
    fitted = sum(not calibrate.held_out(i, len(chunks)) for i in range(len(chunks)))
    assert len(set(chunks[:, 0].tolist())) == len(chunks) <= rows
    assert len(chunks) == rows or steps * min(transfer.ROWS, length) <= fitted * length <= steps * min(transfer.ROWS, length) + 3 * length


def test_long_pieces_are_neighbours_and_hold_nothing_that_is_measured():
    ids = list(range(40 * 8))
    corpus = train.Corpus.cut(ids, 8)
    measured = set(corpus.validation.flatten().tolist())
    assert measured
    pieces = corpus.joined(35, 2)
    assert pieces.shape[1] == 32 and len(pieces) >= 2 and not measured & set(pieces.flatten().tolist())
    assert all(torch.equal(piece, piece[0] + torch.arange(32)) for piece in pieces)
    assert torch.equal(corpus.joined(8, 2), corpus.training) and torch.equal(corpus.joined(3, 2), corpus.training)


def test_a_short_text_makes_shorter_pieces():
    corpus = train.Corpus.cut(list(range(10 * 8)), 8)  # one of ten is measured
    pieces = corpus.joined(64, 4)
    assert len(pieces) >= 4 and pieces.shape[1] == 16
    assert torch.equal(train.Corpus.cut(list(range(16)), 8).joined(64, 2), torch.arange(8, 16)[None])
