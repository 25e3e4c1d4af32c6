"""Whose a training folder is: the same run goes on, everything else is refused, and nothing that lies there crashes."""

import contextlib
import pickle
from pathlib import Path
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


def test_a_run_that_was_stopped_while_it_made_its_folder_goes_on(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(training_folder.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        claim(tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").iterdir()] == [training_folder.UNFINISHED]
    monkeypatch.undo()
    claim(tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").iterdir()] == [training_folder.RECORD]


def test_the_record_is_written_once(tmp_path):
    claim(tmp_path / "work")
    before = (tmp_path / "work" / training_folder.RECORD).stat()
    claim(tmp_path / "work")
    after = (tmp_path / "work" / training_folder.RECORD).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def finished(folder):
    """A run's folder with its result, and its name."""
    claim(folder / "work")
    (folder / "work" / "deep").mkdir()
    for name in ("deep/a", "b"):
        (folder / "work" / name).write_text("x")
    (folder / "work" / training_folder.RESULT).mkdir()
    return folder / "work", folder / "target"


@pytest.mark.parametrize("stop", range(6))
def test_wherever_the_end_of_a_run_is_stopped_the_next_one_cleans_up(tmp_path, monkeypatch, stop):
    """Before the result has its name there is work to go on with, from then on a folder that goes."""
    work, target = finished(tmp_path)
    left = [stop]

    def counted(real):
        def call(*args, **options):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return real(*args, **options)

        return call

    for name in ("rename", "unlink"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(training_folder.shutil, "rmtree", counted(training_folder.shutil.rmtree))
    with contextlib.suppress(KeyboardInterrupt):
        training_folder.finish(work, target)
    monkeypatch.undo()
    assert target.exists() == (stop > 0) and work.exists() == (stop < 5)
    training_folder.sweep(work, target)
    assert work.exists() != target.exists()
    if work.exists():
        claim(work)
        assert (work / "deep" / "a").is_file() and not (work / training_folder.FINISHED).exists()


def test_a_folder_that_goes_is_known_to_the_end(tmp_path, monkeypatch):
    work, _ = finished(tmp_path)
    monkeypatch.setattr(training_folder.shutil, "rmtree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        claim(work, fresh=True)
    monkeypatch.undo()
    claim(work, {"tokens": 6}, fresh=True)
    assert [path.name for path in work.iterdir()] == [training_folder.RECORD]


def test_a_text_is_known_by_its_content(tmp_path):
    one, other = (training_folder.of_text(tmp_path / "a", content) for content in ("one", "two"))
    assert one != other and one == training_folder.of_text(tmp_path / "a", "one") and one["bytes"] == other["bytes"] == 3


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
