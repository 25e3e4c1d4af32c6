"""Bundles with a compressed cache: the graph that an export and a re-plan write, what the commands say and refuse."""

import json

import onnx
import pytest
import tiny_bundle
from click.testing import CliRunner

from edgekv import layout
from edgekv.cli import main
from edgekv.export.replan import replan
from edgekv.policy import CachePolicy, parse_budget

PACKED = CachePolicy(format="selfindex", boundary=32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_bundle.make(tmp_path_factory.mktemp("source") / "full", keep="full", kept=256, element="fp32", context=1024)


def nodes(bundle):
    graph = onnx.load(bundle.graph_path, load_external_data=False).graph
    return {kind: [n for n in graph.node if n.op_type == kind] for kind in ("BoundedCacheAttention", "SignVQRetrieval")}


def attributes(node):
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def test_every_compressed_layer_has_a_node_that_chooses(source, tmp_path):
    made = replan(source, tmp_path / "packed", PACKED, None, check_parity=False)
    found = nodes(made)
    assert len(found["SignVQRetrieval"]) == len(found["BoundedCacheAttention"]) == 2
    for choose, attend in zip(*reversed(found.values()), strict=True):
        assert list(attend.input) == [*choose.input, choose.output[0]] and len(attend.input) == 8
        assert attributes(choose) == attributes(attend)
        assert attributes(attend)["format"] == 1 and attributes(attend)["intervals"] == 32


def test_a_dense_cache_again_has_none(source, tmp_path):
    packed = replan(source, tmp_path / "packed", PACKED, None, check_parity=False)
    again = replan(packed, tmp_path / "again", CachePolicy(format="selfindex", boundary=64, key_bits=4), None, check_parity=False)
    assert len(nodes(again)["SignVQRetrieval"]) == 2 and len(nodes(again)["BoundedCacheAttention"][0].input) == 8
    dense = replan(again, tmp_path / "dense", CachePolicy(element="fp32", boundary=32), parse_budget("256tok"), check_parity=False)
    found = nodes(dense)
    assert not found["SignVQRetrieval"] and all(len(n.input) == 7 for n in found["BoundedCacheAttention"])
    assert attributes(found["BoundedCacheAttention"][0])["format"] == 0


def test_what_the_manifest_says(source, tmp_path):
    policy = CachePolicy(keep="heavy", format="selfindex", key_bits=4, value_bits=2, retrieve="96", boundary=32, observe=8)
    made = replan(source, tmp_path / "packed", policy, parse_budget("300tok"), check_parity=False)
    params, stored = made.layers[0]["params"], made.manifest["policy"]
    assert stored["retrieve"] == "96" and stored["rerank"] is None and (stored["key_bits"], stored["value_bits"]) == (4, 2) and stored["sinks"] == 64
    assert (params["key_bits"], params["value_bits"]) == (4, 2) and params["body_slots"] == 192 and params["sinks"] == 64  # with the tail 288 of 300 tokens: a block of 32 more does not fit
    assert made.manifest["parity"] is None and made.first_eviction == 288 and made.first_loss == 32 and made.capacity == 1024
    assert "5-bit keys that are their own index, 2-bit values" in stored["words"]
    assert "96 compressed tokens" in stored["words"] and "the first 64 tokens" in stored["words"]


def test_parity_with_the_first_bundle(source, tmp_path):
    """Exact before the first boundary, close behind it: the gate passes with 8-bit values."""
    made = replan(source, tmp_path / "packed", CachePolicy(format="selfindex", boundary=64, value_bits=8, sinks=16), None)
    assert made.compressed


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def refused(*arguments):
    """The one sentence of a call that ends with exit code 2."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_inspect_itemises_every_plane(source, tmp_path):
    made = replan(source, tmp_path / "packed", PACKED, None, check_parity=False)
    shown = json.loads(run("inspect", made.folder, "--json").output)
    assert sum(shown["arena_by_plane"].values()) == made.arena_bytes
    planes = shown["arena_by_plane"]
    body = made.layers[0]["params"]["body_slots"]
    assert planes["index"] == 2 * 2 * body * 2 and planes["payload"] == 2 * 2 * body * layout.record_bytes(made.layers[0]["params"])
    assert "body_k" not in planes
    owners = shown["memory_by_owner"]
    assert sum(size for name, size in owners.items() if name.startswith("kv ")) == made.arena_bytes
    assert owners["kv index"] == planes["index"] and owners["kv sinks"] == planes["sink_k"] + planes["sink_v"]
    words = run("inspect", made.folder).output
    for part in ("codebook", "5-bit keys, 4-bit values", "7.5% of the compressed tokens", "bytes per token and kv head"):
        assert part in " ".join(words.split())


def test_a_manifest_that_says_nothing_of_key_bits_means_two(tmp_path):
    def older(manifest):
        del manifest["policy"]["key_bits"]
        for layer in manifest["layers"]:
            del layer["params"]["key_bits"]

    made = tiny_bundle.make(tmp_path / "b", keep="full", kept=96, cache="selfindex", key_bits=2, change=older)
    words = " ".join(run("inspect", made.folder).output.split())
    assert "3-bit keys that are their own index" in words and "token and kv head, 3-bit keys" in words
    assert run("run", made.folder, "-p", "x" * 60, "-n", "2", "--threads", "1").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--key-bits", "4"], "key bits belongs to cache 'selfindex'"),
        (["--value-bits", "4"], "value bits belongs to cache 'selfindex'"),
        (["--retrieve", "96"], "retrieve belongs to cache 'selfindex'"),
        (["--cache", "selfindex", "--retrieve", "none"], "takes a number of tokens"),
        (["--cache", "selfindex", "--keep", "window", "--positions", "cache", "--kv-budget", "128tok"], "compressed keys cannot be turned"),
        (["--cache", "selfindex", "--keep", "window"], "needs --kv-budget"),
        (["--cache", "selfindex", "--kv-budget", "1KiB"], "too small"),
    ],
)
def test_options_that_make_no_sense(source, tmp_path, arguments, words):
    assert words in refused("export", source.folder, "-o", tmp_path / "b", *arguments)
    assert not (tmp_path / "b").exists()


def test_nothing_to_retrieve_from_a_dense_bundle(source):
    for arguments in (["run", source.folder, "-p", "x", "--retrieve", "96"], ["eval", source.folder, "--retrieve", "96"]):
        assert "--cache selfindex" in refused(*arguments)


def test_an_engine_without_the_plugin_is_refused_before_anything_is_built(source, tmp_path):
    made = replan(source, tmp_path / "packed", PACKED, None, check_parity=False)
    assert "cannot be built without edgekv's plugin" in refused("build", made.folder, "--no-plugin")


@pytest.mark.parametrize(("asked", "retrieved"), [([], 24), (["--retrieve", "100%"], 276), (["--retrieve", "8", "--rerank", "1"], 8)])
def test_a_run_may_retrieve_more_or_less(tmp_path, asked, retrieved):
    made = tiny_bundle.make(tmp_path / "b", keep="full", kept=480, context=512, sinks=12, cache="selfindex", retrieve="24", chunk=32)
    prompt = "It is a truth universally acknowledged. " * 7  # 280 bytes
    done = run("run", made.folder, "-p", prompt, "-n", "20", "--ignore-eos", "--threads", "1", "--json", *asked)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)["report"]
    assert report["position"] >= 299 and report["index"]["tokens_retrieved"] == retrieved
    assert report["index"]["tokens_compressed"] == 276 and report["index"]["payload_bytes_per_step"] > 0


def test_two_caches_side_by_side(tmp_path):
    """eval takes the dense one as reference, names where they part, and reads the text with what was asked for."""
    options = {"keep": "full", "kept": 480, "context": 512, "chunk": 32}
    dense = tiny_bundle.make(tmp_path / "dense", **options)
    packed = tiny_bundle.make(tmp_path / "packed", **options, sinks=12, cache="selfindex", retrieve="24", value_bits=8)
    whole, few = (
        json.loads(run("eval", packed.folder, dense.folder, "--tokens", "400", "--tasks", "none", "--threads", "1", "--json", *asked).stdout)
        for asked in (["--retrieve", "all"], [])
    )
    assert whole["reference"] == "dense" and whole["first_eviction"] == 32
    assert [b["retrieve"] for b in whole["bundles"]] == ["all", None] and few["bundles"][0]["retrieve"] == "24"
    close, far = (made["bundles"][0]["against_reference"]["top1_agreement"] for made in (whole, few))
    assert far < close < 1
