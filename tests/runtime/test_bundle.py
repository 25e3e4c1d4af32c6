"""Writing, reading and refusing bundles."""

import json
import os
import subprocess
import sys

import onnx
import pytest
import tiny_bundle

from edgekv import bundle
from edgekv.errors import BundleError, UserError


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return tiny_bundle.make(tmp_path_factory.mktemp("bundle") / "tiny").folder


@pytest.fixture
def copy(pristine, tmp_path):
    import shutil

    return shutil.copytree(pristine, tmp_path / "copy")


def edit(folder, change):
    """Changes the manifest as an attacker would: without touching the rest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_opens_what_was_sealed(pristine):
    opened = bundle.open_bundle(pristine)
    assert opened.model["name"] == "tiny" and opened.boundary == 32
    assert set(opened.manifest["files"]) == {"model.onnx", "model.onnx.data", "tokenizer.json", "chat_template.jinja"}
    assert opened.arena_bytes == sum(layer["bytes"] for layer in opened.layers)
    assert opened.weight_bytes == sum((pristine / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_every_flipped_byte_is_found_by_its_hash(copy, name):
    path = copy / name
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the clock on the file does not help the damage
    with pytest.raises(BundleError, match=f"{name} is damaged: its sha256"):
        bundle.open_bundle(copy)
    if name == "model.onnx.data":  # nothing else looks at the weights
        bundle.open_bundle(copy, verify=False)


@pytest.mark.parametrize("verify", [True, False])
def test_truncated_and_missing_files(copy, verify):
    weights = copy / "model.onnx.data"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(BundleError, match="is damaged: it has"):
        bundle.open_bundle(copy, verify)
    weights.unlink()
    with pytest.raises(BundleError, match="is missing"):
        bundle.open_bundle(copy, verify)


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 10**30, [1]])
def test_other_format_versions_are_refused(copy, version):
    edit(copy, lambda m: m.update(version=version))
    with pytest.raises(BundleError, match="format version .* reads version 1"):
        bundle.open_bundle(copy)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": "other"}', "[" * 100_000, '{"format": NaN}', "\xff"])
def test_manifest_that_is_none(copy, text):
    (copy / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError):
        bundle.open_bundle(copy)


def set_path(path, value):
    def change(manifest):
        *way, last = path
        for key in way:
            manifest = manifest[key]
        if value is ...:
            del manifest[last]
        else:
            manifest[last] = value

    return change


@pytest.mark.parametrize(
    "path, value",
    [
        (["model"], []), (["model", "vocab"], 0), (["model", "vocab"], 10**12), (["model", "context"], True), (["model", "name"], ...),
        (["model", "eos_token_ids"], [1.5]), (["model", "bos_token_id"], "<s>"), (["model", "layers"], 3), (["graph", "file"], "x.onnx"),
        (["graph", "file"], "../model.onnx"), (["graph", "chunk"], 0), (["layers"], {}), (["layers", 0], 7),
        (["layers", 0, "params", "tail_slots"], ...), (["layers", 0, "params", "sinks"], 49), (["layers", 0, "params", "novel"], 1),
        (["layers", 0, "params", "key_dim"], 10**30), (["layers", 0, "params", "body_slots"], 48.0), (["layers", 0, "bytes"], 11264),
        (["layers", 0, "params", "scale"], float("nan")), (["layers", 0, "params"], {}), (["layers", 1, "params", "tail_slots"], 64), (["layers", 0, "bytes"], 10**18),
        (["layers", 0, "params", "scale"], "big"), (["layers", 0, "params", "scale"], 1e300), (["layers", 0, "inv_freq"], 5),
        (["inv_freq"], [["x"]]), (["inv_freq"], [[1.0]]), (["inv_freq"], ...), (["files", "model.onnx", "bytes"], -1),
        (["files", "model.onnx", "sha256"], None), (["files", "/etc/passwd"], {"bytes": 1, "sha256": ""}),
        (["files", "../x"], {"bytes": 1, "sha256": ""}), (["files", "a/../../x"], {"bytes": 1, "sha256": ""}),
        (["files", "C:\\x"], {"bytes": 1, "sha256": ""}), (["files", ""], {"bytes": 1, "sha256": ""}), (["parity"], 3), (["policy"], None), (["policy", "key_bits"], "x"), (["policy", "keep"], 0),
        (["weights", "format"], ...), (["draft"], {}), (["draft"], None), (["draft"], {"head_tokens": 10**30, "coverage": None}),
        (["draft"], {"head_tokens": 5, "coverage": "all"}), (["parity"], {"mean_kl": float("inf")}), (["device"], float("nan")),
    ],
)  # fmt: skip
def test_wrong_manifest_fields_get_a_sentence(copy, path, value):
    edit(copy, set_path(path, value))
    with pytest.raises(BundleError) as refusal:
        bundle.open_bundle(copy)
    assert "\n" not in str(refusal.value) and str(refusal.value).endswith(".")


def test_link_that_leaves_the_bundle(copy, tmp_path):
    outside = tmp_path / "outside.json"
    (copy / "tokenizer.json").rename(outside)
    (copy / "tokenizer.json").symlink_to(outside)
    with pytest.raises(BundleError, match="link that leaves the bundle"):
        bundle.open_bundle(copy)


@pytest.mark.parametrize(
    "location", ["../outside.data", "/etc/passwd", "model.onnx.data/../../x", "..\\x", "", "unlisted.data", "C:\\windows\\x"]
)
@pytest.mark.parametrize("place", ["initializer", "constant node in a subgraph"])
def test_external_data_must_stay_inside(copy, location, place):
    model = onnx.load(copy / "model.onnx", load_external_data=False)
    (copy / "unlisted.data").write_bytes(b"x" * 64)
    tensor = next(t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    if place == "initializer":
        tensor = next(t for t in model.graph.initializer if t.name == tensor.name)
    else:
        inner = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["c"], value=tensor)], "inner", [], [])
        model.graph.node.append(onnx.helper.make_node("If", ["position"], ["z"], then_branch=inner, else_branch=inner))
        tensor = model.graph.node[-1].attribute[0].g.node[0].attribute[0].t
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = location
    (copy / "model.onnx").write_bytes(model.SerializeToString())
    edit(copy, lambda m: m["files"]["model.onnx"].update(bytes=(copy / "model.onnx").stat().st_size,
                                                        sha256=bundle.sha256_file(copy / "model.onnx")))  # fmt: skip
    with pytest.raises(BundleError, match="outside the bundle|does not list"):
        bundle.open_bundle(copy)


def test_graph_file_of_random_bytes_never_crashes(copy, tmp_path):
    import random

    from edgekv import protobuf

    source = random.Random(0)
    good = (copy / "model.onnx").read_bytes()
    path = tmp_path / "mutated.onnx"
    refused = 0
    for _ in range(500):
        data = bytearray(good)
        for _ in range(source.randrange(1, 8)):
            data[source.randrange(len(data))] = source.randrange(256)
        path.write_bytes(data[: source.randrange(1, len(data) + 1)])
        try:
            protobuf.scan_model(path)
        except ValueError:
            refused += 1
    assert refused > 100
    for data in (b"", b"\x3a" * 5000, b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f"):
        path.write_bytes(data)
        with pytest.raises(ValueError):
            protobuf.scan_model(path)


def test_reads_operators_and_locations_as_onnx_does(pristine):
    from edgekv import protobuf

    locations, operators = protobuf.scan_model(pristine / "model.onnx")
    model = onnx.load(pristine / "model.onnx", load_external_data=False)
    assert locations == {"model.onnx.data"}
    assert operators == {(node.domain, node.op_type) for node in model.graph.node}


# ------------------------------------------------------------------------------------------- pain 1: nothing half-written


def test_pain_01_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), bundle.create(tmp_path / "made") as folder:
        (folder / "model.onnx").write_bytes(b"x" * 100)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_pain_01_disk_full_is_a_sentence_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="could not be written: No space left"), bundle.create(tmp_path / "made") as folder:
        (folder / "model.onnx").write_bytes(b"x")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_pain_01_killed_writer_leaves_no_bundle_and_is_cleaned_up(tmp_path):
    script = (
        "import sys, time\nfrom edgekv import bundle\n"
        "with bundle.create(sys.argv[1]) as folder:\n"
        "    (folder / 'model.onnx').write_bytes(b'x' * 1000); print('ready', flush=True); time.sleep(60)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, tmp_path / "made"], stdout=subprocess.PIPE)
    writer.stdout.readline()
    writer.kill()
    writer.wait()
    assert not (tmp_path / "made").exists()
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left[0].name.startswith(".made.partial-")
    with pytest.raises(BundleError):
        bundle.open_bundle(left[0])
    tiny_bundle.make(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_pain_01_writers_of_one_name_do_not_disturb_each_other(tmp_path):
    with pytest.raises(UserError, match="meanwhile"), bundle.create(tmp_path / "made") as folder:
        (folder / "file").write_text("x")
        tiny_bundle.make(tmp_path / "made")
        assert (folder / "file").exists()
        (folder / "manifest.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    bundle.open_bundle(tmp_path / "made")


def test_existing_target_is_replaced_only_by_force_and_only_a_bundle(tmp_path, pristine):
    tiny_bundle.make(tmp_path / "made")
    with pytest.raises(UserError, match="exists already"), bundle.create(tmp_path / "made"):
        pass
    with pytest.raises(ZeroDivisionError), bundle.create(tmp_path / "made", force=True):
        raise ZeroDivisionError
    bundle.open_bundle(tmp_path / "made")  # the old one survives a failure
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").write_bytes(b"x")
    with pytest.raises(UserError, match="is not a bundle, so --force"), bundle.create(tmp_path / "photos", force=True):
        pass
    assert (tmp_path / "photos" / "me.png").exists()


def test_unwritable_output_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"), bundle.create(tmp_path / "file" / "made"):
        pass
    with pytest.raises(UserError, match="cannot be written"), bundle.create("/proc/made"):
        pass


def test_sections_can_be_replaced_after_sealing(copy):
    bundle.update_manifest(copy, parity={"max_abs_logit_diff": 0.0})
    opened = bundle.open_bundle(copy)
    assert opened.manifest["parity"] == {"max_abs_logit_diff": 0.0} and opened.model["name"] == "tiny"
