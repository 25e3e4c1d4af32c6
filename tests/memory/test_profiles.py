"""Device profiles: every file fits the schema, wrong files are refused with the field's name, names resolve or are suggested."""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgekv.errors import UserError
from edgekv.memory import profiles
from edgekv.memory.schema import first_error

NAMES = sorted(profiles.known())
DEVICES = {
    "jetson-nano", "xavier-nx-8gb", "agx-xavier", "orin-nano-4gb", "orin-nano-8gb", "orin-nx-8gb", "orin-nx-16gb",
    "agx-orin-32gb", "agx-orin-64gb", "agx-thor", "thor-t4000", "raspberry-pi-5", "rk3588", "n150", "imx8mp", "stm32mp25",
}  # fmt: skip


def figures(node, path=""):
    if isinstance(node, dict):
        if "confidence" in node:
            yield path, node
        else:
            for key, child in node.items():
                yield from figures(child, f"{path}.{key}" if path else key)
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from figures(child, f"{path}[{index}]")


def test_every_device_has_a_profile_named_like_its_file():
    assert set(NAMES) == DEVICES
    for name in NAMES:
        assert profiles.load_file(profiles.profiles_folder() / f"{name}.yaml").name == name


@pytest.mark.parametrize("name", NAMES)
def test_profile_fits_the_schema_by_an_independent_validator(name):
    data = dict(profiles.known()[name].data)
    jsonschema.Draft202012Validator(profiles.schema()).validate(data)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_says_where_it_comes_from(name):
    for path, figure in figures(profiles.known()[name].data):
        assert len(figure["source"]) > 5, path
        assert (figure["value"] is None) == (figure["confidence"] == "unknown"), path


@pytest.mark.parametrize("name", NAMES)
def test_bandwidth_agrees_with_clock_and_bus_width(name):
    profile = profiles.known()[name]
    by_formula = 2 * profile.value("memory.clock") * profile.value("memory.bus_width") / 8 / 1000
    assert profile.value("memory.bandwidth") == pytest.approx(by_formula, rel=0.005)


@pytest.mark.parametrize("name", [n for n in NAMES if profiles.known()[n].value("gpu.fp16_dense")])
def test_tensor_rate_agrees_with_sm_count_and_clock(name):
    profile = profiles.known()[name]
    per_sm = {53: 256 * 2, 72: 1024, 87: 2048, 110: 8192}[profile.value("gpu.arch")]
    rate = profile.value("gpu.sm_count") * profile.value("gpu.clock") * 1e6 * per_sm / 1e12
    assert profile.value("gpu.fp16_dense") == pytest.approx(rate, rel=0.01)


def test_power_mode_scales_bandwidth_and_compute():
    full, low = profiles.load("orin-nano-8gb"), profiles.load("orin-nano:15w")
    assert low.peak_gbps == pytest.approx(68.3, abs=0.05) and full.peak_gbps == 102.4
    assert low.tflops() == pytest.approx(10.0, abs=0.1)  # 10.2 is published for the 625 MHz of the original board
    assert low.name == "orin-nano-8gb:15W"


@pytest.mark.parametrize(
    ("asked", "nearest"), [("orin-nono", "orin-nano"), ("agxorin", "agx-orin"), ("raspbery-pi5", "raspberry-pi-5"), ("n100", "n150")]
)
def test_unknown_device_names_the_nearest(asked, nearest):
    with pytest.raises(UserError, match=nearest):
        profiles.load(asked)


def test_unknown_power_mode_names_those_there_are():
    with pytest.raises(UserError, match="15W, 25W, MAXN_SUPER"):
        profiles.load("orin-nano-8gb:9W")
    with pytest.raises(UserError, match="clocks of power mode 15W"):
        profiles.load("agx-orin-64gb:15W")


def refuse(data, pattern):
    with pytest.raises(UserError, match=pattern) as error:
        profiles.parse_profile(yaml.safe_dump(data), "mine.yaml")
    assert "mine.yaml" in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def data():
    return copy.deepcopy(dict(profiles.known()["orin-nano-8gb"].data))


def test_wrong_unit_names_the_field(data):
    data["memory"]["bandwidth"]["unit"] = "GiB/s"
    refuse(data, r"memory\.bandwidth\.unit must be 'GB/s', not 'GiB/s'")


def test_missing_field_is_named(data):
    del data["gpu"]["l2"]
    refuse(data, r"the field gpu\.l2 is missing")


def test_unknown_field_is_named(data):
    data["gpu"]["cache"] = data["gpu"]["l2"]
    refuse(data, r"gpu\.cache is not a field")


def test_number_without_confidence_and_null_with_confidence_are_refused(data):
    data["memory"]["total"]["confidence"] = "unknown"
    refuse(data, r"memory\.total\.confidence must be 'unknown' exactly when")


@pytest.mark.parametrize("value", [-1, 0, "much", float("nan"), float("inf"), True, [1], {"a": 1}])
def test_absurd_memory_is_refused(data, value):
    data["memory"]["total"]["value"] = value
    refuse(data, r"memory\.total\.value must be")


@pytest.mark.parametrize("text", ["", "[]", "a: [", "!!python/object/apply:os.system ['true']", "- \x00", "9" * 5000, "{" * 2000])
def test_text_that_is_no_profile_is_refused(text):
    with pytest.raises(UserError):
        profiles.parse_profile(text, "mine.yaml")


def test_alias_bomb_is_refused_at_once():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(UserError):
        profiles.parse_profile("\n".join(lines), "mine.yaml")
    with pytest.raises(UserError):
        profiles.parse_profile("\n".join([*lines, "name: *a29"]), "mine.yaml")


def test_missing_file_and_directory_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        profiles.load(str(tmp_path / "none.yaml"))
    with pytest.raises(UserError, match="cannot be read"):
        profiles.load_file(tmp_path)


def test_jetpack_releases_of_the_profiles_exist():
    table = {entry["jetpack"]: entry for entry in profiles.jetpack_table()}
    assert table["6.2"]["tensorrt"] == "10.3.0" and table["6.2"]["supported"] and not table["5.1.2"]["supported"]
    for name in NAMES:
        assert set(profiles.known()[name].data["software"]["jetpack"]) <= set(table), name


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-2, 5000), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["MiB", "GB/s", "read", "x"]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(NAMES), choice=st.integers(0, 10**6), leaf=LEAVES, what=st.sampled_from(["replace", "delete", "add"]))
def test_our_validator_agrees_with_jsonschema_on_mutated_profiles(name, choice, leaf, what):
    data = json.loads(json.dumps(dict(profiles.known()[name].data)))
    spots = []

    def walk(node):
        if isinstance(node, (dict, list)):
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                spots.append((node, key))
                walk(node[key])

    walk(data)
    node, key = spots[choice % len(spots)]
    if what == "delete":
        del node[key]
    elif what == "add" and isinstance(node, dict):
        node["extra"] = leaf
    else:
        node[key] = leaf
    ours = first_error(data, profiles.schema())
    theirs = jsonschema.Draft202012Validator(profiles.schema()).is_valid(data)
    assert (ours is None) == theirs, ours
