"""Hardware counters: what each reads from the files or programs it uses, and why it says no where those are missing.

The files and programs are laid out in a temporary folder exactly as the kernel or NVIDIA's tool would have them.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edgekv.memory import counters
from edgekv.memory.counters.base import Counter, Poller, integrate
from edgekv.memory.counters.emc_sysfs import EmcSysfs
from edgekv.memory.counters import perf as perf_module
from edgekv.memory.counters.perf import Perf, parse_stat
from edgekv.memory.counters.rapl import Rapl
from edgekv.memory.counters.resctrl import Resctrl
from edgekv.memory.counters.tegrastats import Tegrastats

LINES = (Path(__file__).parent / "data" / "tegrastats.txt").read_text().splitlines()
ORIN_NANO = next(line for line in LINES if "EMC_FREQ 61%@2133" in line)
ORIN_NX = next(line for line in LINES if "EMC_FREQ" not in line and line.startswith("07-16"))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def program(path: Path, text: str) -> str:
    write(path, "#!/bin/sh\n" + text).chmod(0o755)
    return str(path)


def test_every_counter_keeps_the_protocol_and_says_one_sentence_when_it_cannot_work():
    usable, reasons = counters.usable(counters.all_counters(128, 3199))
    assert {c.name for c in usable} | set(reasons) == {"tegrastats", "emc-sysfs", "resctrl", "perf", "rapl"}
    for counter in counters.all_counters():
        assert isinstance(counter, Counter)
    for sentence in reasons.values():
        assert sentence.endswith(".") and "\n" not in sentence


def test_integral_holds_each_sample_until_the_next():
    assert integrate([(0.1, 10.0), (1.0, 20.0)], 3.0) == pytest.approx(10 * 1.0 + 20 * 2.0)
    assert integrate([], 1.0) is None


def test_poller_ends_when_reading_fails():
    def read():
        raise OSError

    poller = Poller(read, 0.001)
    poller.start()
    time.sleep(0.02)
    assert poller.stop() > 0 and poller.values == []


def test_tegrastats_integrates_traffic_and_power(tmp_path):
    tool = program(tmp_path / "tegrastats", f"while true; do echo '{ORIN_NANO}'; sleep 0.05; done\n")
    counter = Tegrastats(128, program=tool)
    assert counter.unavailable() is None
    counter.start()
    time.sleep(0.5)
    reading = counter.stop()
    assert reading.dram_bytes / reading.seconds == pytest.approx(0.61 * 2133e6 * 2 * 16, rel=0.01)
    assert reading.joules / reading.seconds == pytest.approx(16.321, rel=0.01)
    assert reading.details == {"emc_mhz": 2133, "gpu_mhz": (612,), "gpu_percent": 99}


def test_tegrastats_without_emc_field_measures_power_alone(tmp_path):
    tool = program(tmp_path / "tegrastats", f"while true; do echo '{ORIN_NX}'; echo garbage; sleep 0.05; done\n")
    counter = Tegrastats(128, 3199, program=tool)
    counter.start()
    time.sleep(0.3)
    reading = counter.stop()
    assert reading.dram_bytes is None and reading.joules / reading.seconds == pytest.approx(4.304, rel=0.01)


def test_tegrastats_that_dies_gives_no_figure(tmp_path):
    counter = Tegrastats(128, program=program(tmp_path / "tegrastats", "exit 1\n"))
    counter.start()
    time.sleep(0.1)
    assert counter.stop().dram_bytes is None


def test_tegrastats_needs_the_bus_width(tmp_path):
    tool = program(tmp_path / "tegrastats", "true\n")
    assert "--device" in Tegrastats(None, program=tool).unavailable()


@pytest.mark.parametrize(
    "activity", ["sys/kernel/debug/cactmon/mc_all", "sys/kernel/debug/bpmp/debug/actmon/mc_all_avg_activity", "sys/kernel/actmon_avg_activity/mc_all"]
)
def test_emc_activity_over_clock_is_a_percentage(tmp_path, activity):
    write(tmp_path / activity, str(60 * 2133000))  # percent times kHz
    write(tmp_path / "sys/kernel/debug/bpmp/debug/clk/emc/rate", "2133000000\n")
    counter = EmcSysfs(128, tmp_path)
    assert counter.unavailable() is None
    counter.start()
    time.sleep(0.1)
    reading = counter.stop()
    assert reading.dram_bytes / reading.seconds == pytest.approx(0.60 * 2133e6 * 2 * 16, rel=0.01)
    assert reading.samples and reading.details["emc_mhz"] == 2133


@pytest.mark.parametrize("content", ["", "x\n", "-\n"])
def test_emc_files_without_numbers_are_no_counter(tmp_path, content):
    write(tmp_path / "sys/kernel/debug/cactmon/mc_all", content)
    write(tmp_path / "sys/class/devfreq/bwmgr/cur_freq", "4266000000\n")
    assert EmcSysfs(256, tmp_path).unavailable() is not None


def test_emc_percent_beyond_100_is_not_believed(tmp_path):
    write(tmp_path / "sys/kernel/debug/cactmon/mc_all", str(150 * 2133000))
    write(tmp_path / "sys/class/devfreq/bwmgr/cur_freq", "2133000000\n")
    counter = EmcSysfs(128, tmp_path)
    counter.start()
    time.sleep(0.05)
    assert counter.stop().dram_bytes is None


def test_resctrl_sums_domains_and_reports_the_difference(tmp_path):
    files = [write(tmp_path / f"sys/fs/resctrl/mon_data/mon_L3_0{i}/mbm_total_bytes", f"{1000 * i}\n") for i in range(2)]
    counter = Resctrl(tmp_path)
    assert counter.unavailable() is None
    counter.start()
    write(files[0], "5000\n")
    assert counter.stop().dram_bytes == 5000
    write(files[1], "Unavailable\n")
    assert "not mounted or not supported" in counter.unavailable()


def test_rapl_counts_joules_and_unwraps(tmp_path):
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    write(zone / "energy_uj", "9000000\n")
    write(zone / "max_energy_range_uj", "9999999\n")
    counter = Rapl(tmp_path)
    assert counter.unavailable() is None
    counter.start()
    write(zone / "energy_uj", "2000000\n")
    assert counter.stop().joules == pytest.approx(3.0)


def test_perf_output_is_read_strictly():
    text = "1000,,LLC-load-misses,100,100.00,,\n<not supported>,,LLC-store-misses,0,100.00,,\n\ngarbage\n-5,,x\nnan,,y\n12.5,MiB,uncore_imc/data_reads/,1,1\n7,parsecs,z\n"
    assert parse_stat(text) == {"LLC-load-misses": 1000.0, "uncore_imc/data_reads/": 12.5 * 2**20}


def test_perf_prefers_memory_controllers(tmp_path):
    write(tmp_path / "sys/bus/event_source/devices/uncore_imc_0/events/cas_count_read", "event=0x4,umask=0x3\n")
    tool = program(
        tmp_path / "perf",
        'case "$*" in *true) echo "1.0,MiB,uncore_imc_0/cas_count_read/" >&2; exit 0;; esac\n'
        'trap \'echo "64.0,MiB,uncore_imc_0/cas_count_read/" >&2; exit 0\' INT TERM\nwhile true; do sleep 0.02; done\n',
    )
    counter = Perf(tmp_path, tool)
    assert counter.unavailable() is None
    counter.start()
    time.sleep(0.2)
    reading = counter.stop()
    assert reading.dram_bytes == 64 * 2**20 and reading.covers == "everything on the socket"


def test_perf_counts_64_bytes_per_miss_of_this_process(tmp_path):
    tool = program(
        tmp_path / "perf",
        'case "$*" in *true) echo "1,,LLC-load-misses" >&2; exit 0;; esac\n'
        'trap \'printf "100,,LLC-load-misses\\n20,,LLC-store-misses\\n" >&2; exit 0\' INT TERM\nwhile true; do sleep 0.02; done\n',
    )
    counter = Perf(tmp_path, tool)
    counter.start()
    time.sleep(0.2)
    assert counter.stop().dram_bytes == 120 * 64


@pytest.mark.parametrize("deaf", ["INT", "INT TERM"])
def test_perf_that_does_not_hear_a_signal_is_ended_all_the_same(tmp_path, monkeypatch, deaf):
    monkeypatch.setattr(perf_module, "PATIENCE", 0.3)
    tool = program(
        tmp_path / "perf",
        'case "$*" in *true) echo "1,,LLC-load-misses" >&2; exit 0;; esac\n'
        f'trap "" {deaf}\ntrap \'echo "7,,LLC-load-misses" >&2; exit 0\' TERM\n' + ("trap '' TERM\n" if "TERM" in deaf else "")
        + "while true; do sleep 0.02; done\n",
    )  # fmt: skip
    counter = Perf(tmp_path, tool)
    counter.start()
    time.sleep(0.2)
    reading = counter.stop()
    assert reading.dram_bytes == (None if "TERM" in deaf else 7 * 64)
    assert counter._process.returncode is not None


def test_perf_that_supports_nothing_says_so(tmp_path):
    tool = program(tmp_path / "perf", 'echo "<not supported>,,LLC-load-misses" >&2\n')
    assert "virtual machines" in Perf(tmp_path, tool).unavailable()
