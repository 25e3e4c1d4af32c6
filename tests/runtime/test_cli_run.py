"""`edgekv run`, bench and inspect as processes: output for people and machines, refusals, signals."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
import tiny_bundle
from tiny_bundle import follow

from edgekv import bundle


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with bundles: one that says 'Hi né!', one that never ends, a full one."""
    root = tmp_path_factory.mktemp("bundles")
    tiny_bundle.make(root / "hi", attention=0.0, follows=follow("Hi né!"))
    tiny_bundle.make(root / "endless", attention=0.0, follows=dict(zip([259, *b"abcd"], b"abcda", strict=True)))
    tiny_bundle.make(root / "full", keep="full", kept=64, boundary=32)
    tiny_bundle.make(root / "bare", template=None)
    return root


# ------------------------------------------------------------------------------------------------------------------ output


def test_text_to_standard_output_and_report_to_standard_error(edgekv, folder):
    done = edgekv("run", folder / "hi", "--prompt", "<bot>")
    assert (done.returncode, done.stdout.decode()) == (0, "Hi né!\n")
    report = done.stderr.decode()
    for line in ("prefill   1 tokens", "decode    7 tokens", "KV cache", "allocated", "kept of", "evicted", "peak resident", "ended"):
        assert line in report


@pytest.mark.parametrize("way", ["prompt", "file", "stdin"])
def test_json_is_one_object_with_everything(edgekv, folder, tmp_path, way):
    text = "é" * 100 + "<bot>"
    (tmp_path / "prompt.txt").write_text(text, encoding="utf-8")
    given = {"prompt": ["--prompt", text], "file": ["--prompt-file", tmp_path / "prompt.txt"], "stdin": []}[way]
    done = edgekv("run", folder / "hi", *given, "--json", "--threads", 1, stdin=text.encode() if way == "stdin" else b"")
    answer = json.loads(done.stdout)
    assert done.stdout.count(b"\n") == 1 and done.stderr == b""
    assert answer["text"] == "Hi né!" and answer["token_ids"] == list("Hi né!".encode())
    assert (answer["finish_reason"], answer["prompt_tokens"]) == ("eos", 201)
    report = answer["report"]
    assert report["prompt_tokens_computed"] == 201 and report["generated_tokens"] == 7 and report["threads"] == 1
    assert report["tokens_kept"] + report["tokens_evicted"] == report["position"] == 208
    assert report["kv_bytes_allocated"] >= report["kv_bytes_used"] > 0 and report["peak_rss_bytes"] > 10 << 20
    assert report["prefill_tokens_per_second"] > 0 and report["decode_tokens_per_second"] > 0


def test_stop_length_seed_and_quiet(edgekv, folder):
    done = edgekv("run", folder / "hi", "-p", "<bot>", "--stop", "né", "--quiet")
    assert (done.stdout.decode(), done.stderr) == ("Hi \n", b"")
    answer = json.loads(edgekv("run", folder / "endless", "-p", "<bot>", "-n", "7", "--json").stdout)
    assert (answer["text"], answer["finish_reason"]) == ("abcdabc", "length")
    drawn = ["run", folder / "full", "-p", "x", "-n", "8", "--temperature", "1.5", "--top-k", "50", "--ignore-eos", "--json"]
    first = json.loads(edgekv(*drawn).stdout)
    again = json.loads(edgekv(*drawn, "--seed", first["seed"]).stdout)
    assert first["token_ids"] == again["token_ids"] and len(first["token_ids"]) == 8


def test_a_full_cache_says_so(edgekv, folder):
    answer = json.loads(edgekv("run", folder / "full", "-p", "x" * 90, "-n", "0", "--ignore-eos", "--json").stdout)
    assert answer["finish_reason"] == "capacity" and len(answer["token_ids"]) == 7
    assert "the cache is full" in edgekv("run", folder / "full", "-p", "x" * 90, "-n", "0", "--ignore-eos").stderr.decode()


def test_conversation_from_lines(edgekv, folder):
    done = edgekv("run", folder / "hi", "--chat", stdin="one\ntwo\n\n/reset\nthree\n/exit\nfour\n".encode())
    assert (done.returncode, done.stdout.decode()) == (0, "Hi né!\n" * 3)
    talk = json.loads(edgekv("run", folder / "hi", "--chat", "--json", "--system", "S", stdin=b"one\ntwo\n").stdout)
    assert [turn["text"] for turn in talk["turns"]] == ["Hi né!"] * 2
    assert talk["report"]["prompt_tokens"] > talk["report"]["prompt_tokens_computed"]  # the second turn continues the first
    single = json.loads(edgekv("run", folder / "hi", "--chat", "--prompt", "one", "--json").stdout)
    assert single["text"] == "Hi né!" and len(single["turns"]) == 1


def test_sampling_defaults_come_from_the_bundle(edgekv, tmp_path):
    tiny_bundle.make(tmp_path / "b", generation={"temperature": 2.0, "top_k": 40})
    texts = {edgekv("run", tmp_path / "b", "-p", "x", "-n", "12", "-q", "--seed", s).stdout for s in (1, 2, 3)}
    assert len(texts) == 3
    texts = {edgekv("run", tmp_path / "b", "-p", "x", "-n", "12", "-q", "--seed", s, "--temperature", "0").stdout for s in (1, 2)}
    assert len(texts) == 1


def test_reader_that_leaves_early_is_no_error(folder):
    command = [sys.executable, "-m", "edgekv", "run", str(folder / "endless"), "-p", "<bot>", "-n", "0"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout.read(4) == b"abcd"
    run.stdout.close()
    assert run.wait(30) == 0 and b"Traceback" not in run.stderr.read()


# ---------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--prompt", "x", "--prompt-file", "y"], "exclude each other"),
        (["--prompt-file", "/nonexistent/x"], "There is no file"),
        (["--prompt-file", "/"], "cannot be read"),
        (["--prompt", "x", "--system", "S"], "add --chat"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature"),
        (["--prompt", "x", "--top-p", "0"], "--top-p"),
        (["--prompt", "x", "--stop", ""], "--stop"),
        (["--prompt", ""], "prompt is empty"),
    ],
)
def test_pain_16_wrong_options_get_one_sentence(refused, folder, tmp_path, arguments, words):
    chosen = folder / "hi"
    if arguments == ["--prompt", ""]:
        chosen = tiny_bundle.make(tmp_path / "b", change=lambda m: m["model"].update(bos_token_id=None)).folder
    assert words in refused("run", chosen, *arguments)


@pytest.mark.parametrize("arguments", [["--max-tokens", "-1"], ["--threads", "0"], ["--no-such-option"], ["--seed", "x"], ["--top-k", "1.5"]])
def test_pain_16_options_out_of_range_are_refused_at_parse_time(edgekv, folder, arguments):
    done = edgekv("run", folder / "hi", "--prompt", "x", *arguments)
    assert done.returncode == 2 and b"Traceback" not in done.stderr and b"Error: " in done.stderr and done.stdout == b""


@pytest.mark.parametrize("command", ["run", "eval"])
def test_a_manifest_of_another_cache_than_the_graphs(refused, tmp_path, command):
    """Every field is sensible by itself; that the graph was made for others shows when it runs."""
    made = tiny_bundle.make(tmp_path / "other")
    for layer in made.layers:
        layer["params"]["scale"] *= 2
    bundle.seal(made.folder, {**made.manifest, "layers": made.layers})
    more = {"run": ["--prompt", "x"], "eval": ["--tokens", "64", "--tasks", "none"]}[command]
    assert "describe different caches; export the bundle again" in refused(command, made.folder, *more)


def test_prompt_that_is_not_utf8(refused, folder, tmp_path):
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    assert "latin.txt is not UTF-8 text (byte 2 is wrong)" in refused("run", folder / "hi", "--prompt-file", tmp_path / "latin.txt")
    assert "Standard input is not UTF-8" in refused("run", folder / "hi", stdin=b"\xff")
    assert "Standard input is not UTF-8" in refused("run", folder / "hi", "--chat", stdin=b"\xff")


def test_conversation_without_a_template(refused, folder):
    assert "has no chat template" in refused("run", folder / "bare", "--chat", "--prompt", "x")


def test_prompt_that_cannot_fit(refused, folder):
    assert "has 97 tokens and this bundle ends at 96" in refused("run", folder / "full", "--prompt", "x" * 97)
    assert "ends at 96" in refused("run", folder / "full", "--chat", "--prompt", "x" * 97)


@pytest.mark.parametrize("name", ["run", "bench", "inspect"])
def test_bundles_that_are_none(refused, folder, tmp_path, name):
    arguments = ["--prompt", "x"] if name == "run" else []
    assert "There is no bundle" in refused(name, tmp_path / "nothing", *arguments)
    assert "is not a bundle" in refused(name, tmp_path, *arguments)
    made = tiny_bundle.make(tmp_path / "b")
    data = bytearray((made.folder / "model.onnx.data").read_bytes())
    data[1000] ^= 4
    (made.folder / "model.onnx.data").write_bytes(data)
    assert "is damaged: its sha256" in refused(name, made.folder, *arguments)
    manifest = json.loads((made.folder / "manifest.json").read_text())
    (made.folder / "manifest.json").write_text(json.dumps({**manifest, "version": 9}))
    assert "format version 9, this edgekv" in refused(name, made.folder, *arguments)


def test_unknown_command_and_help(edgekv):
    done = edgekv("nothing")
    assert done.returncode == 2 and b"No such command" in done.stderr
    shown = edgekv("--help").stdout.decode()
    assert all(f"\n  {name} " in shown for name in ("run", "bench", "inspect", "export"))


# ----------------------------------------------------------------------------------------------------------------- signals


class Terminal:
    """The command on a pseudo-terminal, as somebody at a keyboard has it."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "edgekv", *map(str, arguments)]
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment)
        os.close(slave)
        self.shown, self._read = "", 0

    def wait_for(self, text, seconds=60):
        """Reads until `text` shows after what was waited for before."""
        deadline = time.monotonic() + seconds
        while text not in self.shown[self._read :]:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.master, 4096).decode(errors="replace")
                except OSError:  # the other side has closed
                    break
        assert text in self.shown[self._read :], self.shown
        self._read = self.shown.index(text, self._read) + len(text)

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def close(self):
        self.process.kill()
        os.close(self.master)


def test_interrupt_ends_the_answer_not_the_conversation(folder):
    terminal = Terminal("run", folder / "endless", "--chat", "-n", "0")
    try:
        terminal.wait_for("> ")
        for _ in range(2):
            terminal.type("go\n")
            terminal.wait_for("abcdabcd")
            terminal.interrupt()
            terminal.wait_for("(interrupted)")
            terminal.wait_for("> ")
        terminal.type("\x04")  # Ctrl-D
        terminal.wait_for("peak resident")
        assert terminal.process.wait(30) == 0 and "Traceback" not in terminal.shown
    finally:
        terminal.close()


def test_interrupt_of_a_completion_still_reports(folder):
    command = [sys.executable, "-m", "edgekv", "run", str(folder / "endless"), "-p", "<bot>", "-n", "0"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout.read(8) == b"abcdabcd"
    run.send_signal(signal.SIGINT)
    text, report = run.communicate(timeout=60)
    assert run.returncode == 130 and b"ended     interrupted" in report and text.endswith(b"\n")


# --------------------------------------------------------------------------------------------------------- bench, inspect


def test_bench_measures_what_fits(edgekv, folder):
    done = edgekv("bench", folder / "full", "--depths", "16,64,4096", "--tokens", "8", "--repeats", "2", "--threads", "2", "--json")
    shown = json.loads(done.stdout)
    assert [d["depth"] for d in shown["depths"]] == [16, 64] and shown["depths_left_out"] == [4096]
    assert all(d["prefill_tokens_per_second"] > 0 and d["decode_tokens_per_second"] > 0 and d["tokens"] == 8 for d in shown["depths"])
    assert [d["kept"] for d in shown["depths"]] == [24, 72]
    assert shown["machine"]["threads"] == 2 and shown["machine"]["cpu"] and shown["load_before"] >= 0
    text = edgekv("bench", folder / "full", "--depths", "16", "--tokens", "8").stdout.decode()
    assert "decode tok/s" in text and "\n     16 " in text


@pytest.mark.parametrize("depths", ["", "x", "0", "1,,2", "-5", "99999999999"])
def test_bench_refuses_depths_that_are_none(refused, folder, depths):
    assert "--depths takes numbers" in refused("bench", folder / "full", "--depths", depths)


def test_bench_refuses_when_no_depth_fits(refused, folder):
    assert "ends at 96 tokens" in refused("bench", folder / "full", "--depths", "4096")


def test_inspect_adds_up(edgekv, folder):
    shown = json.loads(edgekv("inspect", folder / "hi", "--json").stdout)
    owners = shown["memory_by_owner"]
    arena = sum(count for owner, count in owners.items() if owner.startswith("kv "))
    assert arena == sum(layer["bytes"] for layer in shown["layers"])
    assert owners["kv body"] == 2 * 48 * 2 * 32 * 2 and owners["kv tail"] == 2 * 32 * 2 * 32 * 2
    assert "the first 4 tokens" in shown["policy_in_words"] and "without end" in shown["policy_in_words"]
    text = edgekv("inspect", folder / "hi").stdout.decode()
    for words in ("all hashes right", "Memory by owner", "kv body", "weights", "Parity", "body 48 + tail 32"):
        assert words in text
