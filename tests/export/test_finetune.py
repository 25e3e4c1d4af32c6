"""Fine-tuning for thin keys: what changes, what holds, and that neither an interruption nor a second process does anything to it."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tiny_models import make, random_text

from edgekv.bundle import open_bundle
from edgekv.cli import main
from edgekv.errors import UserError
from edgekv.export import exporter, load
from edgekv.export.parity import bundle_logits
from edgekv.export.thin import finetune, map_file, ranks, rounding, train, trainable
from edgekv.export.thin.finetune import Options
from edgekv.export.thin.maps import KeyMaps
from edgekv.export.thin.pairs import PairMaps

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
OPTIONS = {"rank": "50%", "form": "projected", "steps": 4, "batch": 4, "length": 32, "calibrate_tokens": 256, "calibrate_steps": 2, "transfer_steps": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"The {i}th keeper of the lighthouse wrote {i * i} letters. " for i in range(60)))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make(tmp_path_factory.mktemp("llama") / "model", "llama")


def tensors(folder):
    return load_file(folder / "model.safetensors")


def run(model, target, text, losses=None, stop=lambda step: False, **changes):
    def report(stage, done, total):
        if losses is not None and stage.startswith("training, loss"):
            losses.append(stage)

    return finetune.make_model(str(model), target, Options(texts=(text,), **{**OPTIONS, **changes}), report, stop)


@pytest.fixture(scope="module")
def tuned(llama, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned") / "thin"
    losses = []
    figures = run(llama, folder, text, losses, loss="both", rate=0.02)
    return folder, figures, losses


def test_only_queries_and_keys_changed_and_the_rank_holds(llama, tuned):
    folder, figures, losses = tuned
    before, after = tensors(llama), tensors(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{i}.self_attn.{w}_proj.weight" for i in range(2) for w in "qk"}
    assert figures["trained_weights"] == len(changed) and len(losses) == 4
    made = map_file.load(folder)
    for index, layer in enumerate(made):
        assert layer.rank == 8 == figures["ranks"][index]
        for head in range(4):
            assert torch.linalg.matrix_rank(layer.query[head] @ layer.key[head // 2].T) <= 8
    assert not (folder.parent / f"{folder.name}.training").exists()
    for name in ("perplexity_full", "perplexity_thin_before", "perplexity_thin_transferred", "perplexity_thin_after", "perplexity_control"):
        assert figures[name] > 1
    assert json.loads((folder / finetune.RECORD).read_text()) == figures


@pytest.fixture(scope="module")
def latent(llama, text, tmp_path_factory):
    """A model with latent keys, from a run that was stopped in its transfer and in its training."""
    folder = tmp_path_factory.mktemp("latent") / "thin"
    work = folder.parent / f"{folder.name}.training"

    def layers():
        return len(torch.load(work / "transfer.pt")["maps"]) if (work / "transfer.pt").exists() else 0

    for stop in (lambda step: layers() == 1 and step == 2, lambda step: layers() == 2 and step == 2):
        assert run(llama, folder, text, form="latent", rate=0.02, stop=stop) is None and not folder.exists()
    return folder, run(llama, folder, text, form="latent", rate=0.02)


def test_of_latent_keys_the_maps_alone_are_trained(llama, text, latent, tmp_path):
    """What a cache keeps whole, the latest keys, stays what it was."""
    folder, figures = latent
    straight = run(llama, tmp_path / "thin", text, form="latent", rate=0.02)
    assert straight == figures and figures["form"] == "latent" and figures["trained_weights"] == 0
    before, after = tensors(llama), tensors(folder)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    for layer, again in zip(map_file.load(folder), map_file.load(tmp_path / "thin"), strict=True):
        assert layer.form == "latent" and layer.rank == 16 and torch.linalg.matrix_rank(layer.encoder @ layer.decoder) <= 16
        assert all(map(torch.equal, layer.parts(), again.parts()))
    trained = run(llama, tmp_path / "longer", text, form="latent", steps=30, loss="text", rate=0.02)
    assert trained["perplexity_thin_after"] < trained["perplexity_thin_before"]


def test_latent_keys_that_were_trained_are_exported(llama, latent, tmp_path):
    """The parity gate among it: logits equal those of the model with these maps behind the first boundary too."""
    options = ["--context", "128", "--weights", "fp32", "--kv-type", "fp32"]
    result = CliRunner().invoke(main, ["export", str(latent[0]), "-o", str(tmp_path / "bundle"), *options])
    assert result.exit_code == 0, result.output
    made = open_bundle(tmp_path / "bundle")
    assert made.latent and made.manifest["keys"]["form"] == "latent" and made.manifest["keys"]["ranks"] == latent[1]["ranks"] == [16, 16]
    whole = CliRunner().invoke(main, ["export", str(llama), "-o", str(tmp_path / "whole"), *options])
    ids = random_text(100)
    difference = np.abs(bundle_logits(made, ids) - bundle_logits(open_bundle(tmp_path / "whole"), ids)).max(-1)
    boundary = made.layers[0]["params"]["tail_slots"]
    assert whole.exit_code == 0 and difference[:boundary].max() < 1e-4 < difference[boundary:].max()
    refused = CliRunner().invoke(main, ["export", str(latent[0]), "-o", str(tmp_path / "other"), "--key-form", "projected", *options])
    assert refused.exit_code == 2 and "trained as latent ones" in refused.output and not (tmp_path / "other").exists()


def test_with_fewer_rotary_pairs_the_weights_alone_learn(llama, text, tmp_path):
    """Stopped in its transfer and in its training or not; what is left out learns nothing; exported, the gate finds the same logits, and of
    weights that learned through the rounding every matrix has 4 bits."""
    target, work, options = tmp_path / "thin", tmp_path / "thin.training", {"form": "pairs", "weights": "int4", "rate": 0.02}

    def layers():
        return len(torch.load(work / "transfer.pt")["maps"]) if (work / "transfer.pt").exists() else 0

    for stop in (lambda step: layers() == 1 and step == 2, lambda step: layers() == 2 and step == 2):
        assert run(llama, target, text, stop=stop, **options) is None
    figures = run(llama, target, text, **options)
    assert figures == run(llama, tmp_path / "straight", text, **options) and figures["ranks"] == [8, 8] and figures["trained_weights"] == 4
    before, after = tensors(llama), tensors(target)
    assert all(torch.equal(tensor, tensors(tmp_path / "straight")[name]) for name, tensor in after.items())
    for index, layer in enumerate(map_file.load(target)):
        assert torch.equal(layer.pairs, map_file.load(tmp_path / "straight")[index].pairs) and layer.pairs.shape == (2, 4)
        left = torch.tensor([[pair not in head.tolist() for pair in range(8)] * 2 for head in layer.pairs])
        for name, heads in (("q", left.repeat_interleave(2, 0)), ("k", left)):
            name = f"model.layers.{index}.self_attn.{name}_proj.weight"
            moved = (after[name] - rounding.rounded(before[name])).reshape(*heads.shape, -1).abs().amax(-1)
            assert moved[heads].max() < 1e-6 < moved[~heads].min()
    trained = run(llama, tmp_path / "longer", text, form="pairs", steps=30, loss="text", rate=0.02)
    assert trained["perplexity_thin_after"] < trained["perplexity_thin_before"]

    for more, bits in ((["--weights", "fp32", "--kv-type", "fp32"], set()), (["--weights", "int4"], {4})):
        folder = tmp_path / f"bundle{len(bits)}"
        result = CliRunner().invoke(main, ["export", str(target), "-o", str(folder), "--context", "128", *more])
        assert result.exit_code == 0, result.output
        products = [node for node in onnx.load(open_bundle(folder).graph_path, load_external_data=False).graph.node if node.op_type == "MatMulNBits"]
        assert {next(a.i for a in node.attribute if a.name == "bits") for node in products[:-1]} == bits  # the last is the LM head


@pytest.mark.parametrize("name, form", [("llama", "pairs"), ("qwen3", "projected"), ("phi3", "projected"), ("opt", "projected")])
def test_the_form_follows_from_the_model_when_none_is_given(text, tmp_path, name, form):
    """Also for the same command after a run that was stopped, whose work says it."""
    model, first = make(tmp_path / "model", name), []
    assert run(model, tmp_path / "thin", text, form=None, stop=lambda step: bool(first.append(step)) or len(first) > 1) is None
    assert run(model, tmp_path / "thin", text, form=None)["form"] == form == map_file.load(tmp_path / "thin")[0].form


@pytest.mark.parametrize("name, rank, form", [("stablelm", "50%", "projected"), ("stablelm", "auto:90%", "pairs"), ("llama", "7", "projected"), ("phi", "75%", "pairs")])
def test_the_form_follows_from_the_rank_when_none_is_given(tmp_path, name, rank, form):
    source, wanted = load.find(str(make(tmp_path / "model", name))), ranks.parse(rank)
    assert exporter.whole_geometry(source, 128, lambda stage, done, total: None, None, False, wanted)[1] == form
    if form == "projected":
        with pytest.raises(UserError, match=f"--key-rank {rank} does not .* use --key-form projected"):
            exporter.whole_geometry(source, 128, lambda stage, done, total: None, "pairs", False, wanted)


def test_a_model_with_one_matrix_for_all_three_has_nothing_that_pairs_could_train(text, tmp_path):
    with pytest.raises(UserError, match="with one matrix, which is not trained"):
        run(make(tmp_path / "phi3", "phi3"), tmp_path / "thin", text, form="pairs")


def test_a_rotation_that_is_not_recognised_is_refused_before_any_training(text, tmp_path):
    with pytest.raises(UserError, match="not recognised in the graph"):
        run(make(tmp_path / "gptj", "gptj"), tmp_path / "thin", text, form="latent")


def test_training_helps(llama, text, tmp_path):
    figures = run(llama, tmp_path / "thin", text, steps=30, loss="text", rate=0.02)
    assert figures["perplexity_thin_after"] < figures["perplexity_thin_before"]
    assert figures["perplexity_control"] < figures["perplexity_full"]


def test_products_are_rounded_while_training_and_at_no_other_time(llama, text, tuned, tmp_path, monkeypatch):
    """float32 numbers are learned either way; what is calibrated and measured multiplies them as they are."""
    measured, trained, wanted = [], set(), torch.get_float32_matmul_precision()
    real = train.perplexity

    def perplexity(*args):
        measured.append(torch.get_float32_matmul_precision())
        return real(*args)

    def stop(step):
        trained.add(torch.get_float32_matmul_precision())
        return False

    monkeypatch.setattr(train, "perplexity", perplexity)
    figures = run(llama, tmp_path / "thin", text, loss="both", rate=0.02, precision="bf16", stop=stop)
    assert trained == {"medium"} and set(measured) == {wanted} and torch.get_float32_matmul_precision() == wanted
    assert figures["precision"] == "bf16" and tuned[1]["precision"] == "fp32"
    assert figures["perplexity_thin_after"] == pytest.approx(tuned[1]["perplexity_thin_after"], rel=0.05)
    with pytest.raises(ZeroDivisionError), train.products("bf16"):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == wanted


def test_the_result_is_exported_like_any_model(tuned, tmp_path):
    folder, figures, _ = tuned
    result = CliRunner().invoke(main, ["export", str(folder), "-o", str(tmp_path / "bundle"), "--context", "128", "--weights", "fp32", "--kv-type", "fp32"])
    assert result.exit_code == 0, result.output  # the parity gate among it: logits equal those of the model with these maps
    made = open_bundle(tmp_path / "bundle")
    assert made.manifest["keys"]["ranks"] == figures["ranks"] and all(layer["params"]["key_dim"] == 8 for layer in made.layers)
    with pytest.raises(UserError, match="has thin keys already"):
        run(folder, tmp_path / "again", tuned[0] / "config.json")
    refused = CliRunner().invoke(main, ["draft", str(folder), "-o", str(tmp_path / "draft"), "--tokens", "100000"])
    assert refused.exit_code == 2 and "has thin keys" in refused.output


@pytest.fixture(scope="module")
def coarse(llama, text, tmp_path_factory):
    """A model that learned through the rounding to 4 bits."""
    folder = tmp_path_factory.mktemp("coarse") / "thin"
    return folder, run(llama, folder, text, weights="int4", loss="both", rate=0.02)


def test_what_learns_through_the_rounding_ends_on_its_grid(llama, text, tuned, coarse, tmp_path):
    target, work = tmp_path / "thin", tmp_path / "thin.training"
    before, after = tensors(llama), tensors(coarse[0])
    for name, tensor in before.items():
        learned = name.endswith(("q_proj.weight", "k_proj.weight"))
        assert torch.equal(tensor, after[name]) != learned
        if learned:
            torch.testing.assert_close(rounding.rounded(after[name]), after[name], rtol=0, atol=1e-6)
    assert coarse[1]["weights"] == "int4" and coarse[1]["perplexity_control"] != tuned[1]["perplexity_control"]

    def layers():
        return len(torch.load(work / "transfer.pt")["maps"]) if (work / "transfer.pt").exists() else 0

    for stop in (lambda step: layers() == 1 and step == 2, lambda step: layers() == 2 and step == 2):
        assert run(llama, target, text, weights="int4", loss="both", rate=0.02, stop=stop) is None
    assert run(llama, target, text, weights="int4", loss="both", rate=0.02) == coarse[1]
    assert all(torch.equal(tensor, tensors(target)[name]) for name, tensor in after.items())


def test_training_through_the_rounding_helps(llama, text, tmp_path):
    """What is measured is rounded, so it has learned in spite of the rounding."""
    figures = run(llama, tmp_path / "thin", text, steps=60, loss="text", rate=0.02, weights="int4")
    assert figures["perplexity_thin_after"] < figures["perplexity_thin_before"]


def test_what_was_trained_keeps_eight_bits(llama, tuned, coarse, tmp_path):
    """The other matrices of a checkpoint may lie on a grid of 4 bits; what was trained does so only if it learned through the rounding."""
    for model, exact in ((tuned[0], 2), (llama, 0), (coarse[0], 0)):
        target = tmp_path / f"bundle of {model.parent.name}"
        result = CliRunner().invoke(main, ["export", str(model), "-o", str(target), "--context", "128", "--no-parity"])
        assert result.exit_code == 0, result.output
        products = [node for node in onnx.load(open_bundle(target).graph_path, load_external_data=False).graph.node if node.op_type == "MatMulNBits"]
        bits = [next(a.i for a in node.attribute if a.name == "bits") for node in products]
        assert bits.count(8) == exact + 1 and bits[-1] == 8 and bits.count(4) == len(bits) - exact - 1  # the last is the LM head


def test_a_stopped_run_goes_on_bit_for_bit(llama, text, tuned, tmp_path):
    target, work = tmp_path / "thin", tmp_path / "thin.training"

    def layers():
        return len(torch.load(work / "transfer.pt")["maps"]) if (work / "transfer.pt").exists() else 0

    assert run(llama, target, text, loss="both", rate=0.02, stop=lambda step: layers() == 1 and step == 2) is None  # in the attention transfer
    assert layers() == 1 and not (work / "training.pt").exists()
    assert run(llama, target, text, loss="both", rate=0.02, stop=lambda step: layers() == 2 and step == 2) is None
    assert not target.exists() and (work / "training.pt").is_file()
    kept = text.read_text()
    for content, loss in ((kept, "text"), (kept.replace("letters", "numbers"), "both")):
        text.write_text(content)
        with pytest.raises(UserError, match="other options"):
            run(llama, target, text, loss=loss, rate=0.02)
    text.write_text(kept)
    figures = run(llama, target, text, loss="both", rate=0.02)
    assert figures == tuned[1]
    for name, tensor in tensors(tuned[0]).items():
        assert torch.equal(tensor, tensors(target)[name]), name
    for a, b in zip(map_file.load(tuned[0]), map_file.load(target), strict=True):
        assert all(map(torch.equal, a.parts(), b.parts()))


def command(model, target, text, *more):
    return [
        "finetune", str(model), "-o", str(target), "--key-rank", "50%", "--key-form", "projected", "--text", str(text), "--steps", "4", "--batch", "4", "--length", "32",
        "--calibrate-tokens", "256", "--calibrate-steps", "2", "--transfer-steps", "3", "--loss", "both", "--rate", "0.02", *more,
    ]  # fmt: skip


def test_a_killed_run_goes_on(llama, text, tuned, tmp_path):
    target, saved = tmp_path / "thin", tmp_path / "thin.training" / "training.pt"
    killed = subprocess.Popen(
        [sys.executable, "-m", "edgekv", *command(llama, target, text, "--save-every", "1")],
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not saved.is_file() and killed.poll() is None:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not target.exists() or killed.returncode == 0
    result = CliRunner().invoke(main, command(llama, target, text)) if not target.exists() else None
    assert result is None or result.exit_code == 0, result.output
    for name, tensor in tensors(tuned[0]).items():
        assert torch.equal(tensor, tensors(target)[name]), name


@pytest.mark.parametrize("form", ["projected", "latent"])
def test_two_processes_lose_what_one_does(llama, text, tuned, latent, tmp_path, form):
    target, (folder, one) = tmp_path / "thin", {"projected": tuned[:2], "latent": latent}[form]
    options = ["--loss", one["loss"], "--key-form", form]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
         "--dynamo_backend", "no", "--main_process_port", "0", "-m", "edgekv", *command(llama, target, text, *options)],
        env={**ENVIRONMENT, "ACCELERATE_USE_CPU": "true"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    two = json.loads((target / finetune.RECORD).read_text())
    assert two["processes"] == 2 and one["processes"] == 1
    assert two["perplexity_thin_after"] == pytest.approx(one["perplexity_thin_after"], rel=1e-4)
    assert two["perplexity_control"] == (one["perplexity_control"] and pytest.approx(one["perplexity_control"], rel=1e-4))
    for name, tensor in tensors(folder).items():
        torch.testing.assert_close(tensors(target)[name], tensor, atol=2e-4, rtol=1e-3)
    for a, b in zip(map_file.load(folder), map_file.load(target), strict=True):
        torch.testing.assert_close(a.parts(), b.parts(), atol=2e-4, rtol=1e-3)


def test_a_refused_form_can_be_corrected_as_the_sentence_says(text, tmp_path):
    model = make(tmp_path / "gptj", "gptj")
    with pytest.raises(UserError, match="--key-form projected"):
        run(model, tmp_path / "thin", text, form="latent")
    assert run(model, tmp_path / "thin", text, form="projected", steps=1, transfer_steps=0)["form"] == "projected"


@pytest.mark.parametrize("form", ["projected", "latent"])
def test_layers_that_keep_everything_stay_as_they_are(llama, text, tmp_path, form):
    with pytest.raises(UserError, match="nothing to learn"):
        run(llama, tmp_path / "thin", text, form=form, rank="100%")
    figures = run(llama, tmp_path / "thin", text, form=form, rank="auto:90%", rate=0.02)
    whole = [layer for layer in map_file.load(tmp_path / "thin") if layer.whole]
    assert 0 < len(whole) < len(figures["ranks"])
    unit = torch.eye(whole[0].rank)
    assert all(torch.equal(x, unit.expand_as(x)) for layer in whole for x in layer.parts())


@pytest.mark.parametrize("form", ["projected", "latent"])
def test_damaged_work_is_refused(llama, text, tuned, latent, tmp_path, form):
    work, other = tmp_path / "thin.training", {"projected": latent, "latent": tuned}[form][0]
    assert run(llama, tmp_path / "thin", text, form=form, stop=lambda step: (work / "transfer.pt").exists() and step == 2) is None
    start, transferred = work / "start" / map_file.FILE, work / "transfer.pt"
    kept, done = start.read_bytes(), torch.load(transferred)
    for content in (b"", kept[:100], (other / map_file.FILE).read_bytes()):
        start.write_bytes(content)
        with pytest.raises(UserError, match="--fresh"):
            run(llama, tmp_path / "thin", text, form=form)
    start.write_bytes(kept)
    for change in (lambda x: x * float("nan"), lambda x: x[..., :1]):
        torch.save({**done, "maps": [tuple(map(change, layer)) for layer in done["maps"]] * 2}, transferred)
        with pytest.raises(UserError, match="--fresh"):
            run(llama, tmp_path / "thin", text, form=form)
    for numbers in (1, torch.ones(1)) if done["parameters"] else ():  # which a copy would spread over a whole matrix
        torch.save({**done, "maps": done["maps"] * 2, "parameters": dict.fromkeys(done["parameters"], numbers)}, transferred)
        with pytest.raises(UserError, match="--fresh"):
            run(llama, tmp_path / "thin", text, form=form)
    torch.save(done, transferred)
    assert run(llama, tmp_path / "thin", text, form=form, stop=lambda step: (work / "training.pt").exists(), save_every=1) is None
    learned = torch.load(work / "training.pt")
    for change in (lambda x: 1, lambda x: x * float("nan"), lambda x: x.flatten()[:1]):
        torch.save({**learned, "parameters": {name: change(x) for name, x in learned["parameters"].items()}}, work / "training.pt")
        with pytest.raises(UserError, match="--fresh"):
            run(llama, tmp_path / "thin", text, form=form)
    torch.save(learned, work / "training.pt")
    assert run(llama, tmp_path / "thin", text, form=form)["form"] == form


@pytest.mark.parametrize("form, damages", [
    ("projected", [lambda layers: layers[:1], lambda layers: [KeyMaps(x.query[:, 1:], x.key[:, 1:]) for x in layers]]),
    ("pairs", [lambda layers: [PairMaps(x.pairs[:0], None) for x in layers], lambda layers: [PairMaps(x.pairs + 8, None) for x in layers]]),
])  # fmt: skip
def test_maps_to_start_from_that_do_not_fit_the_model_are_refused(llama, text, tmp_path, form, damages):
    start = tmp_path / "thin.training" / "start"
    assert run(llama, tmp_path / "thin", text, form=form, stop=lambda step: True) is None
    kept = map_file.load(start)
    for damage in damages:
        map_file.save(start, damage(kept))
        with pytest.raises(UserError, match="start.*; start over with --fresh"):
            run(llama, tmp_path / "thin", text, form=form)


def test_where_one_matrix_makes_all_three_the_maps_alone_are_trained(text, tmp_path):
    model = make(tmp_path / "gpt2", "gpt2")
    figures = run(model, tmp_path / "thin", text, steps=2)
    assert figures["trained_weights"] == 0 and figures["perplexity_control"] is None
    with pytest.raises(UserError, match="maps alone learn"):
        run(model, tmp_path / "coarse", text, weights="int4")
    assert not (tmp_path / "coarse.training").exists()
    before, after = tensors(model), tensors(tmp_path / "thin")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_maps_in_the_weights_leave_no_grid_to_learn_through(text, tmp_path):
    """An export multiplies them into what was rounded, so it is said before any training."""
    model = make(tmp_path / "opt", "opt")
    with pytest.raises(UserError, match="leave out --weights int4"):
        run(model, tmp_path / "thin", text, weights="int4")
    assert not (tmp_path / "thin.training").exists()
    assert run(model, tmp_path / "thin", text, steps=1, transfer_steps=0)["weights"] == "fp32"


def test_pairs_have_no_maps_to_refine(llama, text, tmp_path):
    result = CliRunner().invoke(main, command(llama, tmp_path / "thin", text, "--key-form", "pairs"))
    assert result.exit_code == 2 and "--calibrate-steps refines maps, and --key-form pairs has none" in result.output


def test_a_twin_shares_what_is_not_trained(llama):
    from edgekv.export.thin.make import load_model

    model = load_model(load.find(str(llama)), 128)
    names = trainable.key_side(model, torch.arange(6))
    other = trainable.twin(model, names)
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert (a is b) == (name not in names)


def test_what_cannot_be_is_refused(llama, text, tmp_path):
    with pytest.raises(UserError, match="--key-rank takes"):
        run(llama, tmp_path / "thin", text, rank="half")
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(UserError, match="tokens and at least"):
        run(llama, tmp_path / "thin", short)
    (tmp_path / "there").mkdir()
    work = tmp_path / "there.training"  # of a run that was stopped when it had its result
    work.mkdir()
    for name in ("options.json", "finished", "training.pt"):
        (work / name).write_text("{}")
    with pytest.raises(UserError, match="exists already"):
        run(llama, tmp_path / "there", text)
    assert not work.exists()
    (tmp_path / "thin.training").mkdir()
    (tmp_path / "thin.training" / "mine").write_text("x")
    with pytest.raises(UserError, match="in the way"):
        run(llama, tmp_path / "thin", text)
