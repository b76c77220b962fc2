"""What the profile of a machine says, on laid-out files and on this machine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import psutil
import pytest

from scu_trainer.cli.machine import hardware
from scu_trainer.errors import StorageError
from scu_trainer.hardware import probe
from scu_trainer.hardware import profile as subject
from scu_trainer.hardware.profile import Cpu, Disk, Gpu, GpuUser, HardwareProfile, Ram

GIB = 2**30
CPUINFO = """processor\t: 0
model name\t: A Processor @ 3.00GHz
flags\t\t: fpu vme avx2 amx_bf16 avx512_bf16 fma sse

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""
ANSWER = """GPU-aaaa, 101, /usr/bin/python3, 2048
GPU-bbbb, 102, "a, b", 512
GPU-aaaa, 103, [Not Found], [N/A]
GPU-bbbb, 104, /opt/a, b/python, 1024

"""


def test_the_processor_is_the_first_of_the_file(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(CPUINFO)
    cpu = subject.profile((), root=tmp_path).cpu
    assert cpu.name == "A Processor @ 3.00GHz"
    assert cpu.features == ("avx2", "fma", "avx512_bf16", "amx_bf16")


def test_without_the_file_it_has_the_systems_name(tmp_path):
    cpu = subject.profile((), root=tmp_path).cpu
    assert cpu.name and cpu.features == ()


def test_who_uses_a_gpu(monkeypatch):
    for answer, found in (
        (
            ANSWER,
            [
                ("aaaa", GpuUser(101, "/usr/bin/python3", 2 * GIB)),
                ("bbbb", GpuUser(102, "a, b", GIB // 2)),
                ("aaaa", GpuUser(103, "[Not Found]", None)),
                ("bbbb", GpuUser(104, "/opt/a, b/python", GIB)),
            ],
        ),
        ("", []),
        (None, None),
    ):
        monkeypatch.setattr(probe, "ask_driver", lambda words, answer=answer: answer)
        assert probe.gpu_users() == found


def test_one_line_per_disk_and_paths_need_not_exist(tmp_path):
    found = subject.profile((tmp_path / "a" / "b", tmp_path), measure_disks=False).disks
    assert [disk.path for disk in found] == [str(tmp_path / "a" / "b")]
    assert found[0].total_bytes == shutil.disk_usage(tmp_path).total and found[0].note == "not measured"
    assert not (tmp_path / "a").exists()


def test_a_speed_is_measured_and_the_file_is_gone(tmp_path):
    assert subject.write_speed(tmp_path, 2**20) > 0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_has_no_speed(tmp_path):
    with pytest.raises(StorageError, match="cannot be written"):
        subject.write_speed(tmp_path / "nowhere", 2**20)


def test_little_room_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "free_bytes", lambda path: 2**20)
    (disk,) = subject.profile((tmp_path,)).disks
    assert disk.write_bytes_per_s is None and disk.note == "not measured: less than 1024 MiB free"


def test_the_command_prints_json_of_this_machine(capsys):
    assert hardware.main(["profile", "--json", "--no_disk_speed"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ram"]["total_bytes"] == psutil.virtual_memory().total
    assert found["cpu"]["threads"] == psutil.cpu_count() and found["packages"]["torch"].startswith("2.")


def test_a_gpu_whose_users_nobody_knows_says_so(capsys, monkeypatch):
    machine = subject.profile((), measure_disks=False)
    machine = replace(machine, gpus=(Gpu("cuda", 0, "Card", 24 * GIB, 20 * GIB, "8.6", None),))
    monkeypatch.setattr(hardware, "profile", lambda *arguments, **options: machine)
    assert hardware.main(["profile"]) == 0
    assert "unknown whether anything else uses it" in " ".join(capsys.readouterr().out.split())


def test_a_screen_of_80_columns_holds_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    users = (GpuUser(7, "python", 3 * GIB), GpuUser(8, "other", None))
    machine = HardwareProfile(
        "Linux", "3.11.7", (Gpu("cuda", 0, "Card", 24 * GIB, 20 * GIB, "8.6", users),),
        Cpu("A Processor", "x86_64", 2, 4, 1.5, ("avx2", "fma")), Ram(16 * GIB, 8 * GIB, 0, 12 * GIB),
        (Disk("runs", 100 * GIB, 50 * GIB, 1.5e9), Disk("cache", GIB, GIB, None, "not measured")),
        {"torch": "2.13.0", "flash-attn": None},
    )  # fmt: skip
    monkeypatch.setattr(hardware, "profile", lambda *arguments, **options: machine)
    assert hardware.main(["profile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    for part in (
        "cuda:0 Card, 20.00 GiB free of 24.00 GiB, compute capability 8.6",
        "used by process 7 (python): 3.00 GiB",
        "used by process 8 (other): memory unknown",
        "2 cores, 4 threads, 1.5 usable here",
        "8.00 GiB available of 16.00 GiB, container limit 12.00 GiB",
        "runs: 50.00 GiB free of 100.00 GiB, writes 1,500 MB/s",
        "not installed: flash-attn",
    ):
        assert part in text
    assert max(map(len, lines)) <= 80
