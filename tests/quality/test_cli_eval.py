"""`edgekv eval` as a person calls it, and what it writes."""

import html.parser
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import tiny_bundle
from tokenizers import AddedToken

from edgekv.quality import heatmap, page
from edgekv.memory.charts.canvas import SvgCanvas

FAST = ["--tokens", "400", "--lengths", "700", "--depths", "2"]


def call(*arguments):
    return subprocess.run([sys.executable, "-m", "edgekv", "eval", *map(str, arguments)], capture_output=True, text=True, timeout=300)


def refused(*arguments):
    done = call(*arguments)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.startswith("edgekv: ") and done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture(scope="module")
def made(full, window):
    done = call(full.folder, window.folder, *FAST, "--tasks", "passkey,multi-value", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_figures_side_by_side(made, full, window):
    first, second = made["bundles"]
    assert made["reference"] == first["name"] == "full"
    assert made["first_eviction"] == 64
    assert first["against_reference"]["top1_agreement"] == 1.0
    assert first["against_reference"]["perplexity_ratio"]["ratio"] == 1.0
    assert second["against_reference"]["top1_agreement"] < 1.0
    assert second["perplexity"]["perplexity"] != first["perplexity"]["perplexity"]
    assert [b["kv_bytes"] for b in made["bundles"]] == [full.arena_bytes, window.arena_bytes]
    assert {c["length"] for c in second["tasks"]["passkey"]["cells"]} == {700}
    assert first["tasks"]["multi-value"]["trials"] == 2


def test_caches_agree_while_nothing_is_evicted(full, window):
    done = call(full.folder, window.folder, "--tokens", "65", "--tasks", "none", "--json")
    second = json.loads(done.stdout)["bundles"][1]
    assert second["against_reference"]["top1_agreement"] == 1.0
    first = json.loads(done.stdout)["bundles"][0]
    assert second["perplexity"]["perplexity"] == pytest.approx(first["perplexity"]["perplexity"], rel=1e-6)
    later = json.loads(call(full.folder, window.folder, "--tokens", "400", "--tasks", "none", "--json").stdout)["bundles"]
    assert later[0]["perplexity"]["after_first_eviction"] != pytest.approx(later[1]["perplexity"]["after_first_eviction"], rel=1e-3)


def test_table_and_page(full, window, tmp_path):
    done = call(full.folder, window.folder, *FAST, "--html", tmp_path / "report.html", "--png", tmp_path / "png")
    assert done.returncode == 0, done.stderr
    for expected in ("same top token", "passkey", "full", "window"):
        assert expected in done.stdout
    parser = html.parser.HTMLParser()
    content = (tmp_path / "report.html").read_text()
    parser.feed(content)
    assert content.count("<svg") == 2 and "http" not in content.replace("http://www.w3.org/2000/svg", "")
    assert sorted(p.name for p in (tmp_path / "png").iterdir()) == ["needle-passkey.png", "perplexity.png"]
    assert not list(tmp_path.glob(".*partial"))


def test_a_text_of_ones_own(full, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("It rained on Monday and nobody came. " * 60)
    done = call(full.folder, "--text", own, *FAST, "--json")
    found = json.loads(done.stdout)
    assert found["text"]["name"] == "own.txt" and found["text"]["tokens"] == 400


def test_prompts_that_do_not_fit_are_left_out_and_said_so(tmp_path):
    small = tiny_bundle.make(tmp_path / "small", keep="full", kept=1024)
    done = call(small.folder, "--tokens", "0", "--lengths", "700,1500", "--depths", "1")
    assert done.returncode == 0 and "cannot hold prompts of 1500 tokens" in done.stdout


def test_reference_can_be_named(full, window):
    done = call(window.folder, "--reference", full.folder, *FAST, "--tasks", "none", "--json")
    found = json.loads(done.stdout)
    assert found["reference"] == "full" and [b["name"] for b in found["bundles"]] == ["window", "full"]
    done = call(full.folder, window.folder, "--reference", window.folder, *FAST, "--tasks", "none", "--json")
    assert json.loads(done.stdout)["reference"] == "window"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--lengths", "many"], "--lengths takes"),
        (["--lengths", "1"], "--lengths takes"),
        (["--tasks", "riddles"], "no task 'riddles'"),
        (["--tasks", "none", "--tokens", "0"], "nothing to measure"),
        (["--text", "/nonexistent/file.txt"], "There is no file"),
        (["--html", "/nonexistent/folder/page.html"], "cannot be written"),
        (["--reference", "/nonexistent/bundle"], "There is no bundle"),
    ],
)
def test_bad_options(full, arguments, sentence):
    assert sentence in refused(full.folder, *arguments)


def test_bad_texts(full, tmp_path):
    (tmp_path / "short.txt").write_text("Hello.")
    assert "fewer than 200 words" in refused(full.folder, "--text", tmp_path / "short.txt")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 400)
    assert "not UTF-8" in refused(full.folder, "--text", tmp_path / "latin.txt")
    (tmp_path / "list.txt").write_text("one two three\n" * 200)
    assert "no sentences" in refused(full.folder, "--text", tmp_path / "list.txt", "--lengths", "700")


def test_different_tokenizers_cannot_be_compared(full, tmp_path):
    tokenizer = tiny_bundle.byte_tokenizer()
    tokenizer.add_tokens([AddedToken("zz", normalized=False)])
    other = tiny_bundle.make(tmp_path / "other", tokenizer=tokenizer, change=lambda m: m["model"].update(vocab=261))
    assert "different tokenizers" in refused(full.folder, other.folder)


def test_names_on_the_page_are_only_text(made):
    nasty = json.loads(json.dumps(made).replace('"full"', '"<script>alert(1)</script>&"'))
    content = page.page(nasty, list(page.charts(nasty)))
    assert "<script" not in content and "&lt;script&gt;" in content


def test_heat_map_has_a_cell_for_every_length_and_depth(made):
    width, height = heatmap.size(made, "passkey")
    canvas = SvgCanvas(width, height)
    heatmap.draw(canvas, made, "passkey")
    root = ElementTree.fromstring(str(canvas))
    boxes = [e for e in root.iter() if e.tag.endswith("rect")]
    assert len(boxes) == 2 * 1 * 2  # bundles, lengths, depths
    assert all(0 <= float(b.get("x")) and float(b.get("x")) + float(b.get("width")) <= width for b in boxes)
    assert all(float(b.get("y")) + float(b.get("height")) <= height for b in boxes)


def test_colours_run_from_red_over_yellow_to_green():
    assert heatmap.colour(0) == "#d73027" and heatmap.colour(0.5) == "#fee08b" and heatmap.colour(1) == "#1a9850"
    assert heatmap.colour(-1) == heatmap.colour(0) and heatmap.colour(2) == heatmap.colour(1)
