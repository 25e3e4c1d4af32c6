"""Finding a model: what is missing, damaged, unknown or hostile gives one sentence and leaves nothing behind."""

import json
import shutil
import struct

import pytest
import tiny_models

from edgekv.errors import UserError
from edgekv.export import checkpoint, gguf, load


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.make(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def model(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "model")


def refused(path):
    with pytest.raises(UserError) as error:
        load.find(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_path(tmp_path):
    assert "no model at" in refused(tmp_path / "nothing")
    assert "no model at" in refused("nothing.gguf")


def test_hub_id_without_a_hub(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "hub cannot be reached" in refused("some-organisation/some-model")


def test_directory_without_config(model):
    (model / "config.json").unlink()
    assert "no config.json" in refused(model)


def test_directory_of_gguf_files_names_one(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "a.gguf" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama", "num_hidden_layers": "two"}'])
def test_damaged_config(model, text):
    (model / "config.json").write_text(text)
    assert "config.json" in refused(model)


def test_unknown_architecture(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "shiny_new_thing"}))
    assert "does not know the architecture 'shiny_new_thing'" in refused(model)


def test_program_code_of_a_model_is_never_run(model):
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (model / "config.json").write_text(json.dumps(config))
    trace = model / "ran"
    (model / "mine.py").write_text(f"open({str(trace)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    assert "own program code" in refused(model)
    assert not trace.exists()


def test_missing_weights(model):
    (model / "model.safetensors").unlink()
    assert "no .safetensors file" in refused(model)


def test_weights_cut_short(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "damaged or cut short" in refused(model)


def test_index_that_names_a_missing_file(model):
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors is missing" in refused(model)


def test_index_may_not_leave_the_directory(model, tmp_path):
    shutil.copy(model / "model.safetensors", tmp_path / "outside.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "../outside.safetensors"}}))
    assert "is missing" in refused(model)


def test_missing_tokenizer(model):
    (model / "tokenizer.json").unlink()
    assert "no tokenizer" in refused(model)


def test_weights_of_another_shape(model):
    source = load.find(str(model))
    source.config.hidden_size = 128
    hollow = checkpoint.ghost(source.config)
    assert checkpoint.match(hollow, source.checkpoint) is None
    with pytest.raises(UserError, match=r"cannot be loaded|does not fit"):
        checkpoint.load_whole(source.folder, source.config, hollow)


# ------------------------------------------------------------------------------------------------------------------- GGUF


def field(name, kind, data):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + data


def header(keys=(), tensors=(), version=3, counts=None):
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    data = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(keys)
    for name, dims, kind, offset in tensors:
        data += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)
    return data


TENSOR = (b"t", (32, 4), 0, 0)  # float32 [4, 32], 512 bytes
GOOD = header([field(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")], [TENSOR])
GOOD += bytes(-len(GOOD) % 32) + bytes(512)
BAD = {
    "empty": (b"", "ends too early"),
    "another format": (b"PK\x03\x04" + bytes(100), "letters GGUF"),
    "version 1": (header(version=1), "version is 1"),
    "no tensors": (header(), "makes no sense"),
    "absurd counts": (header(counts=(1 << 60, 1 << 60)), "makes no sense"),
    "cut in the header": (GOOD[:60], "ends too early"),
    "cut in the data": (GOOD[:-1], "its tensors need"),
    "name longer than the file": (header(counts=(1, 1)) + struct.pack("<Q", 1 << 62), "ends too early"),
    "array longer than the file": (header([field(b"a", 9, struct.pack("<IQ", 8, 1 << 62))], [TENSOR]), "array is longer"),
    "numbers beyond the file": (header([field(b"a", 9, struct.pack("<IQ", 4, 1 << 61))], [TENSOR]), "ends too early"),
    "unknown field type": (header([field(b"a", 77, b"")], [TENSOR]), "unknown type 77"),
    "arrays in arrays": (header([field(b"a", 9, struct.pack("<IQ", 9, 1) * 50)], [TENSOR]), "unknown type 9"),
    "unknown tensor type": (header([], [(b"t", (32,), 999, 0)]), "unknown type 999"),
    "tensor beyond the file": (header([], [(b"t", (1 << 40, 1 << 40), 0, 0)]) + bytes(600), "its tensors need"),
    "too many dimensions": (header([], [(b"t", (1,) * 60, 0, 0)]), "too many dimensions"),
    "odd alignment": (header([field(b"general.alignment", 4, struct.pack("<I", 0))], [TENSOR]) + bytes(600), "power of two"),
}


def test_good_gguf_header_passes(tmp_path):
    (tmp_path / "a.gguf").write_bytes(GOOD)
    gguf.check(tmp_path / "a.gguf")


@pytest.mark.parametrize("case", BAD)
def test_bad_gguf_is_refused_before_it_is_read(case, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data, words = BAD[case]
    (tmp_path / "a.gguf").write_bytes(data)
    assert words in refused(tmp_path / "a.gguf")
    assert not (tmp_path / "cache").exists()


def test_gguf_of_nonsense_leaves_no_conversion(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(GOOD)
    assert "cannot be converted" in refused(tmp_path / "a.gguf")
    assert not any((tmp_path / "cache" / "edgekv" / "gguf").iterdir())
