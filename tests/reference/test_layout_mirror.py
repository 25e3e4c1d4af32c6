"""edgekv.layout against the C++ header that defines the layout, compiled here."""

import pathlib
import re
import subprocess

import numpy as np
import pytest
from cache_cases import bounded_params, make_params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from latent_cases import latent_params

from edgekv import layout
from edgekv.errors import UserError

HEADER_DIR = pathlib.Path(__file__).parents[2] / "plugins" / "layout"
PROGRAM = r"""
#include <cstdio>
#include <initializer_list>
#include "state_layout.h"
int main() {
  edgekv::LayerParams p;
  while (fread(&p, sizeof p, 1, stdin) == 1) {
    const char* sentence = edgekv::check_params(p);
    edgekv::StateLayout s{};
    if (!sentence) s = edgekv::state_layout(p);
    printf("%llu", (unsigned long long)edgekv::params_hash(p));
    for (size_t at : {s.body_pos, s.body_score, s.body_seen, s.body_k, s.body_v, s.body_z, s.index, s.payload, s.mean, s.codebook, s.code_seen,
                      s.sink_k, s.sink_v, s.tail_k, s.tail_v, s.tail_z, s.tail_q, s.bytes})
      printf(" %zu", at);
    printf("|%s\n", sentence ? sentence : "");
  }
}
"""


@pytest.fixture(scope="module")
def header_program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout")
    (folder / "main.cc").write_text(PROGRAM)
    subprocess.run(["g++", "-std=c++17", "-I", HEADER_DIR, "-o", folder / "main", folder / "main.cc"], check=True)
    return folder / "main"


def test_fields_are_those_of_the_table():
    table = re.findall(r"^EDGEKV_(INT|FLOAT)\((\w+), ([\d.]+)f?\)", (HEADER_DIR / "attributes.def").read_text(), re.M)
    assert [(name, {"INT": "i", "FLOAT": "f"}[kind], float(value)) for kind, name, value in table] == [
        (name, code, float(default)) for name, code, default in layout.FIELDS
    ]


@st.composite
def any_params(draw):
    """Sensible parameters with one or two fields set to anything, sensible or not."""
    params = draw(bounded_params() | latent_params() | st.just(make_params()))
    for name, code, _ in draw(st.lists(st.sampled_from(layout.FIELDS), max_size=2)):
        params[name] = draw(st.integers(-3, 1100)) if code == "i" else draw(st.floats(-2, 3, width=32))
    return params


@given(st.lists(any_params(), min_size=20, max_size=40))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large])
def test_offsets_hash_and_checks_equal_the_header(header_program, cases):
    sent = b"".join(layout.pack_params(p) for p in cases)
    lines = subprocess.run([header_program], input=sent, capture_output=True, check=True).stdout.decode().splitlines()
    for params, line in zip(cases, lines, strict=True):
        numbers, sentence = line.split("|")
        digest, *offsets = map(int, numbers.split())
        assert layout.params_hash(params) == digest
        assert (layout.check_params(params) or "") == sentence
        if not sentence:
            assert list(layout.state_layout(params)) == offsets


@given(bounded_params(), st.integers(0, 9))
def test_views_cover_the_block_and_do_not_overlap(params, seed):
    state = layout.new_state(params)
    planes = [getattr(state, name) for name in layout.planes(params)]
    state.block[:] = 0
    for plane in planes:
        plane.view(np.uint8)[...] += 1
    assert state.block[256:].max() <= 1 and state.block[:256].max() == 0
    assert state.block.sum() == sum(plane.nbytes for plane in planes)
    keys = np.random.default_rng(seed).standard_normal((params["kv_heads"], 9, params["key_dim"])).astype(state.tail_k.dtype)
    layout.write_keys(state.tail_k, 5, keys)
    np.testing.assert_array_equal(layout.read_keys(state.tail_k, 5, 14), keys)
    np.testing.assert_array_equal(state.tail_k[0, 0, :, 5], keys[0, 0])


def test_wrong_parameters_are_named():
    with pytest.raises(UserError, match="tail_slots must be a positive multiple of 16"):
        layout.new_state(make_params(tail=15))
