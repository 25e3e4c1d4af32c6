"""Whose a training folder is: the same run goes on, everything else is refused, and nothing that lies there crashes."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from edgekv.errors import UserError
from edgekv.export import training_folder

SOURCE = SimpleNamespace(name="model", checkpoint=SimpleNamespace(bytes=7))
OPTIONS = {"tokens": 5, "texts": ("a.txt",)}


def claim(folder, options=OPTIONS, source=SOURCE, fresh=False):
    training_folder.claim(folder, "draft", source, options, fresh)


def test_the_same_run_goes_on(tmp_path):
    folder = tmp_path / "deep" / "work"
    claim(folder)
    (folder / "done").write_text("x")
    claim(folder)
    assert (folder / "done").is_file()
    claim(folder, {"tokens": 6}, fresh=True)
    assert not (folder / "done").exists()


@pytest.mark.parametrize(
    "change",
    [{"options": {"tokens": 6}}, {"source": SimpleNamespace(name="other", checkpoint=SOURCE.checkpoint)},
     {"source": SimpleNamespace(name="model", checkpoint=SimpleNamespace(bytes=8))}],
)  # fmt: skip
def test_another_run_is_refused(tmp_path, change):
    claim(tmp_path / "work")
    with pytest.raises(UserError, match="with other options"):
        claim(tmp_path / "work", **change)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null"])
def test_a_damaged_record_is_another_run(tmp_path, content):
    claim(tmp_path / "work")
    (tmp_path / "work" / training_folder.RECORD).write_bytes(content)
    with pytest.raises(UserError, match="--fresh to start over"):
        claim(tmp_path / "work")
    claim(tmp_path / "work", fresh=True)


def test_what_is_no_work_of_the_command_is_left_alone(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine").write_text("x")
    for fresh in (False, True):
        with pytest.raises(UserError, match="in the way"):
            claim(tmp_path / "work", fresh=fresh)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written|in the way"):
        claim(tmp_path / "file")
    assert (tmp_path / "work" / "mine").is_file()


def test_what_is_kept_comes_back_and_a_stop_in_the_middle_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    training_folder.save({"step": 3, "parameters": {"a": torch.arange(4.0)}}, path)
    monkeypatch.setattr(torch, "save", lambda state, to: to.write_bytes(b"half"))
    monkeypatch.setattr(type(path), "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        training_folder.save({"step": 4}, path)
    found = training_folder.read(path)
    assert found["step"] == 3 and torch.equal(found["parameters"]["a"], torch.arange(4.0))


class Executed:
    def __reduce__(self):
        return pytest.fail, ("a damaged file was executed",)


@pytest.mark.parametrize("damage", ["empty", "truncated", "text", "pickle", "another kind"])
def test_a_damaged_file_is_said_in_a_sentence(tmp_path, damage):
    path = tmp_path / "run.pt"
    training_folder.save({"step": 3, "parameters": {"a": torch.zeros(1000)}}, path)
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2], "text": b"{}", "pickle": pickle.dumps(Executed()), "another kind": whole}[damage])
    with pytest.raises(UserError, match="is damaged .*; start over with --fresh"):
        saved = training_folder.read(path)
        with training_folder.restoring(path):
            saved["optimizer"]


def test_what_is_refused_at_once_leaves_no_folder(tmp_path):
    claim(tmp_path / "work")
    with pytest.raises(UserError, match="no"), training_folder.beginning(tmp_path / "work"):
        raise UserError("no")
    assert not (tmp_path / "work").exists()
    claim(tmp_path / "work", {"tokens": 6})
    (tmp_path / "work" / "done").write_text("x")
    with pytest.raises(UserError, match="no"), training_folder.beginning(tmp_path / "work"):
        raise UserError("no")
    assert (tmp_path / "work" / "done").is_file()
