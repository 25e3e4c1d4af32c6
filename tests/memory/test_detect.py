"""Detection: caches and clusters from a sysfs tree, power mode and clocks of a Jetson, what the CUDA driver says, the stream test.

Trees are laid out in a temporary folder as the kernel lays them out.
"""

from __future__ import annotations

import subprocess

import pytest
import yaml

from edgekv.memory import calibrate, cuda_query, detect, profiles, stream
from edgekv.memory.predictor import Work, step_time


def cache(base, cpu, index, level, kind, size, shared):
    folder = base / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    folder.mkdir(parents=True)
    for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
        (folder / name).write_text(f"{text}\n")


def test_clusters_of_a_big_little_board(tmp_path):
    """RK3588: four small cores, four large ones, one L3 for all."""
    for cpu in range(8):
        big = cpu >= 4
        cache(tmp_path, cpu, 0, 1, "Data", "64K" if big else "32K", cpu)
        cache(tmp_path, cpu, 1, 1, "Instruction", "64K" if big else "32K", cpu)
        cache(tmp_path, cpu, 2, 2, "Unified", "512K" if big else "128K", cpu)
        cache(tmp_path, cpu, 3, 3, "Unified", "3072K", "0-7")
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-7\n")
    small, big = detect.clusters(tmp_path)
    assert (small["cores"]["value"], small["l1d"]["value"], small["l2"]["value"]) == (4, 32, 128)
    assert (big["cores"]["value"], big["l2"]["value"], big["l3"]["value"], big["l3_shared_by"]["value"]) == (4, 512, 3072, 8)
    assert big["l2_shared_by"]["value"] == 1


def test_machine_without_cache_files_has_unknown_caches(tmp_path):
    (only,) = detect.clusters(tmp_path)
    assert only["l3"]["value"] is None and only["l3"]["confidence"] == "unknown" and only["cores"]["value"] >= 1


@pytest.mark.parametrize(("text", "cpus"), [("0-3", [0, 1, 2, 3]), ("0,2-3", [0, 2, 3]), ("", []), ("x", []), ("0-", []), ("5", [5])])
def test_cpu_lists(text, cpus):
    assert detect.cpu_list(text) == cpus


def test_power_mode_is_named_by_the_boards_own_table(tmp_path):
    (tmp_path / "var/lib/nvpmodel").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "var/lib/nvpmodel/status").write_text("pmode:0002")
    assert detect.power_mode(tmp_path) == "mode 2"
    (tmp_path / "etc/nvpmodel.conf").write_text("< POWER_MODEL ID=0 NAME=15W >\nx\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n")
    assert detect.power_mode(tmp_path) == "MAXN_SUPER"
    assert detect.power_mode(tmp_path / "etc") is None


def test_clocks_are_read_where_they_are_and_absent_where_not(tmp_path):
    for path, text in (
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "1497600"),
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "schedutil"),
        ("sys/kernel/debug/bpmp/debug/clk/emc/rate", "2133000000"),
        ("sys/class/devfreq/17000000.ga10b/cur_freq", "612000000"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert detect.clocks(tmp_path) == {"cpu_mhz": 1498, "emc_mhz": 2133, "gpu_mhz": 612, "cpu_governor": "schedutil"}
    assert detect.clocks(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA Jetson AGX Orin Developer Kit", "agx-orin"), ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", "orin-nano"),
        ("NVIDIA Jetson Nano Developer Kit", "jetson-nano"), ("NVIDIA Jetson Xavier NX Developer Kit", "xavier-nx"), ("NVIDIA Jetson AGX Thor Developer Kit", "thor"),
    ],
)  # fmt: skip
def test_jetson_is_found_by_its_device_tree(tmp_path, model, name):
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_bytes(model.encode() + b"\0")
    assert name in detect.jetson_profile(tmp_path).name
    (tmp_path / "proc/device-tree/model").write_bytes(b"Raspberry Pi 5 Model B Rev 1.0\0")
    assert detect.jetson_profile(tmp_path) is None


def test_driver_is_asked_for_what_a_profile_needs(tmp_path):
    """A library with the driver's three entry points, answering as AGX Orin does."""
    source = tmp_path / "cuda.c"
    source.write_text(
        "int cuInit(unsigned f) { return 0; }\nint cuDeviceGet(int* d, int n) { *d = n; return 0; }\n"
        "int cuDeviceGetAttribute(int* v, int a, int d) {\n"
        "  switch (a) { case 16: *v = 16; return 0; case 38: *v = 4194304; return 0; case 108: *v = 3145728; return 0;\n"
        "    case 13: *v = 1300000; return 0; case 109: *v = 134213632; return 0; case 75: *v = 8; return 0; case 76: *v = 7; return 0; }\n"
        "  return 1; }\n"
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    found = cuda_query.query(str(library))
    assert found["l2_bytes"] == 4194304 and found["persisting_l2_bytes"] == 3145728 and "shared_per_sm_bytes" not in found
    known = profiles.load("agx-orin-32gb").data["gpu"]
    gpu = detect._gpu(known, found)
    assert gpu["sm_count"]["value"] == 16 and gpu["persisting_l2"]["value"] == 3072 and gpu["l2"]["confidence"] == "measured"
    assert gpu["shared_per_sm"] == known["shared_per_sm"] and detect._gpu(known, None) is known


def test_no_driver_is_no_answer(tmp_path):
    assert cuda_query.query("libnothing-of-the-kind.so") is None
    (tmp_path / "broken.so").write_bytes(b"\x7fELF")
    assert cuda_query.query(str(tmp_path / "broken.so")) is None


def test_stream_test_reads_memory_at_a_plausible_rate():
    assert 0.5 < stream.read_gbps(1, 1 << 20) < 2000


def test_a_calibration_on_little_memory_fits_the_schema_and_predicts(monkeypatch):
    """All of it, on footprints of a few MiB; `edgekv devices detect` as a whole is one of the slow tests."""
    monkeypatch.setattr(calibrate.machine, "available_memory", lambda: 64 << 20)
    data = detect.detect(calibrate=False, measure=False)
    data["memory"]["bandwidth"] = data["memory"]["measured_bandwidth"] = detect.figure(20, "GB/s", "a number for this test")
    data["calibration"] = calibrate.calibrate(4 << 20, threads=1)
    profile = profiles.parse_profile(yaml.safe_dump(data), "calibrated.yaml")
    assert profile.data["calibration"]["on_chip"] is None
    step = step_time(profile, Work({"int4": 1e8}, 1e7, layers=24, hidden=1024))
    assert "rates measured on this device" in step.basis and 1e-4 < step.total < 10
    chip = calibrate._weight_rates(4 << 20, 1, "here", calibrate.NARROW)
    assert all(rate["value"] > 0.1 for rate in chip.values())


@pytest.mark.parametrize("rates,held", [
    ({1: 50, 2: 50, 4: 48, 8: 47, 16: 30, 32: 28, 64: 27}, 8),  # a share of a cache of 32 MiB
    ({1: 50, 2: 50, 4: 48, 8: 47, 16: 46, 32: 44, 64: 12}, 32),  # all of it
    ({1: 20, 2: 20, 4: 19, 8: 19, 16: 18, 32: 17, 64: 16}, 32),  # nothing to be seen: what the processor says
])  # fmt: skip
def test_the_share_of_a_cache_is_found_where_reads_slow_down(monkeypatch, rates, held):
    monkeypatch.setattr(stream, "_rate", lambda size, threads, seconds: rates[size * threads >> 20])
    monkeypatch.setattr(stream.machine, "available_memory", lambda: 8 << 30)
    assert stream.held_on_chip(32 << 20, threads=2) == held << 20


def test_detected_profile_fits_the_schema():
    import yaml

    profile = profiles.parse_profile(yaml.safe_dump(detect.detect(measure=False, calibrate=False)), "here")
    assert profile.total_bytes > 0 and profile.value("memory.measured_bandwidth") is None


def test_the_release_of_linux_on_a_jetson(tmp_path):
    assert detect.l4t(tmp_path) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.0, GCID: 37537400, BOARD: generic, EABI: aarch64\n# KERNEL_VARIANT: oot\n")
    assert detect.l4t(tmp_path) == "R36 (release), REVISION: 4.0"
