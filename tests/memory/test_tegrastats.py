"""tegrastats lines: every generation's real line read in full; damaged lines never raise and never yield a figure not in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.memory.counters.tegrastats_line import TegraLine, parse

TEXT = (Path(__file__).parent / "data" / "tegrastats.txt").read_text().splitlines()
LINES = [line for line in TEXT if not line.startswith("#")]
NANO, XAVIER, ORIN_NANO, ORIN_NX, AGX, THOR, AGX39 = LINES


def test_orin_nano_under_load():
    line = parse(ORIN_NANO)
    assert line.timestamp == "10-08-2026 04:35:02"
    assert line.ram == (6712, 7620) and line.swap == (369, 3810)
    assert line.cpu == ((38, 1497), (2, 729), (1, 729), (0, 729), (1, 729), (0, 729))
    assert (line.emc_percent, line.emc_mhz) == (61, 2133)
    assert (line.gpu_percent, line.gpu_mhz) == (99, (612,))
    assert line.engines == {"APE": (None, 200)}
    assert line.temperatures == {"cpu": 57.125, "soc2": 55.093, "soc0": 56.625, "gpu": 58.625, "tj": 58.312, "soc1": 55.937}
    assert line.power == {"VDD_IN": 16321, "VDD_CPU_GPU_CV": 7104, "VDD_SOC": 3120}
    assert line.total_milliwatts == 16321
    assert line.dram_gbps(128) == pytest.approx(0.61 * 2133 * 2 * 16 / 1000)


def test_first_generation_without_timestamp_and_units():
    line = parse(NANO)
    assert line.timestamp is None and line.ram == (331, 3964) and line.swap == (0, 1982)
    assert line.cpu == ((1, 102), (0, 102), (0, 102), (0, 102))
    assert (line.emc_percent, line.emc_mhz, line.gpu_percent, line.gpu_mhz) == (3, 204, 0, (76,))
    assert line.temperatures == {"PLL": 20.5, "CPU": 23.5} and line.total_milliwatts == 933


def test_xavier_bracketed_gpu_clock():
    line = parse(XAVIER)
    assert (line.gpu_percent, line.gpu_mhz) == (0, (114,)) and line.engines == {"VIC_FREQ": (None, 115), "APE": (None, 150)}
    assert line.temperatures["PMIC"] == 50.0 and line.total_milliwatts == 2763 and len(line.cpu) == 6


def test_missing_emc_field_is_no_traffic_figure():
    line = parse(ORIN_NX)
    assert line.emc_percent is None and line.dram_gbps(128) is None and line.dram_gbps(128, emc_mhz=3199) is None
    assert (line.gpu_percent, line.gpu_mhz) == (0, ()) and line.ram == (1224, 15656)


def test_agx_orin_two_gpu_clocks_busy_encoder_and_summed_power():
    line = parse(AGX)
    assert line.gpu_mhz == (0, 0) and line.engines["NVENC"] == (79, 166) and line.engines["VIC"] == (36, 115)
    assert "NVDEC" not in line.engines and line.total_milliwatts == 2412 + 1607 + 4707 and len(line.cpu) == 12


def test_thor_gpu_without_percent_and_no_swap():
    line = parse(THOR)
    assert line.gpu_percent is None and line.gpu_mhz == (314, 314, 314) and line.swap is None
    assert line.engines["NVENC0_FREQ"] == (None, 314) and line.total_milliwatts == 19780 and len(line.cpu) == 14


def test_three_power_values_and_two_temperatures():
    line = parse(AGX39)
    assert line.power == {"VDD_GPU_SOC": 5139, "VDD_CPU_CV": 3268, "VIN_SYS_5V0": 5500}
    assert line.temperatures["gpu"] == 47.625 and line.gpu_mhz == (1300, 1300) and line.emc_mhz == 3199


@pytest.mark.parametrize("form", ["EMC_FREQ 3%", "EMC_FREQ 3%@"])
def test_emc_without_clock_needs_the_clock_from_elsewhere(form):
    line = parse(f"RAM 1/2MB {form} GR3D_FREQ 0%")
    expected = 0.03 * 3199 * 2 * 16 / 1000 if form.endswith("%") else None
    assert line.dram_gbps(128) is None and line.dram_gbps(128, emc_mhz=3199) == (pytest.approx(expected) if expected else None)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("EMC_FREQ 101%@2133", "emc_percent"), ("EMC_FREQ 61 %@2133", "emc_percent"), ("EMC_FREQ 6%@2133 EMC_FREQ 7%@2133", "emc_percent"),
        ("RAM 9/8MB", "ram"), ("RAM 9/8", "ram"), ("GR3D_FREQ 101%@[612]", "gpu_percent"), ("CPU [101%@729]", "cpu"),
        ("CPU [1%@729,]", "cpu"), ("cpu@-256C", "temperatures"), ("VDD_IN 5W/5W", "power"), ("xVDD_IN 5/5", "power"),
    ],
)  # fmt: skip
def test_near_misses_are_no_figures(line, field):
    assert not getattr(parse(line), field)


def test_off_cores_are_marked():
    assert parse("CPU [1%@729,off,2%@729]").cpu == ((1, 729), None, (2, 729))


def numbers(line: TegraLine) -> list[str]:
    """Every figure of a parsed line as it must have been written."""
    found = [line.emc_percent, line.emc_mhz, line.gpu_percent, *line.gpu_mhz, *(line.ram or ()), *(line.swap or ()), *line.power.values()]
    found += [n for core in line.cpu if core for n in core] + [n for engine in line.engines.values() for n in engine]
    return [str(n) for n in found if n is not None]


EDIT = st.tuples(st.sampled_from(["delete", "insert", "swap", "cut", "double"]), st.floats(0, 1), st.text(max_size=3))


@settings(max_examples=1500, deadline=None)
@given(line=st.sampled_from(LINES), edits=st.lists(EDIT, min_size=1, max_size=6))
def test_mutated_lines_never_raise_and_never_invent(line, edits):
    for kind, where, text in edits:
        at = int(where * len(line))
        line = {
            "delete": line[:at] + line[at + 1 :],
            "insert": line[:at] + text + line[at:],
            "swap": line[:at] + line[at : at + 2][::-1] + line[at + 2 :],
            "cut": line[:at],
            "double": line[:at] + line[max(at - 5, 0) :],
        }[kind]
    parsed = parse(line)
    written = {str(int(n)) for n in re.findall(r"[0-9]+", line)}
    assert set(numbers(parsed)) <= written
    for name, value in parsed.temperatures.items():
        assert re.search(rf"(?<!\S){re.escape(name)}@-?0*{abs(int(value))}", line)
    if parsed.emc_percent is not None:
        assert parsed.emc_percent <= 100 and f"EMC_FREQ {parsed.emc_percent}" in re.sub(r" 0+(?=\d)", " ", line)


@settings(max_examples=500, deadline=None)
@given(st.text())
def test_any_text_is_read_without_error(text):
    parse(text)


def test_hostile_length_takes_no_time():
    parse("CPU [" + "1%@1," * 200_000 + "]")
    parse("EMC_FREQ " * 50_000)
    parse("a" * 10**6 + "@1C")
