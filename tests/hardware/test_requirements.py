"""Each requirement, met and unmet, on a machine that is made up."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from scu_trainer.errors import RequirementError
from scu_trainer.hardware import requirements
from scu_trainer.hardware.probe import Accelerator, Machine
from scu_trainer.hardware.requirements import all_required_met, check, render

GIB = 2**30
DECLARED = (
    "torch>=2.11",
    "rich<16,>=15",
    'bitsandbytes>=0.50; extra == "qlora"',
    'deepspeed>=0.19; extra == "deepspeed"',
    'ninja>=1.13; extra == "deepspeed"',
    'scu-trainer[deepspeed,qlora]; extra == "all"',
)


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "out", tmp_path / "cache"


@pytest.fixture
def good(paths):
    return Machine(
        python=(3, 11, 7),
        cpu_cores=2,
        ram_total_bytes=8 * GIB,
        ram_available_bytes=4 * GIB,
        packages={
            "torch": "2.11.0+cu130",
            "rich": "15.0.0",
            "bitsandbytes": "0.50.2",
            "deepspeed": None,
            "ninja": "1.13.0",
        },
        disk_free_bytes=dict.fromkeys(paths, 5 * GIB),
    )


def failed(machine, paths, extras=()):
    """(names of unmet requirements by finding, whether training can start)."""
    findings = check(*paths, extras=extras, machine=machine, declared=DECLARED)
    return {finding.name: finding for finding in findings if not finding.ok}, all_required_met(findings)


def test_a_good_machine_can_start_though_an_optional_part_is_missing(good, paths):
    unmet, can_start = failed(good, paths)
    assert list(unmet) == ["[deepspeed]"] and can_start
    assert unmet["[deepspeed]"].found == "deepspeed missing, ninja 1.13.0"
    assert unmet["[deepspeed]"].fix == "pip install -e '.[deepspeed]'"
    assert not paths[0].exists() and not paths[1].exists()


def test_an_extra_that_the_job_needs_is_required(good, paths):
    unmet, can_start = failed(good, paths, extras=["deepspeed"])
    assert list(unmet) == ["[deepspeed]"] and not can_start


def test_an_unknown_extra_names_the_nearest(good, paths):
    with pytest.raises(RequirementError, match="did you mean 'qlora'"):
        failed(good, paths, extras=["qlora4"])


@pytest.mark.parametrize(
    ("change", "name", "found"),
    [
        ({"python": (3, 10, 12)}, "Python", "3.10.12"),
        ({"packages": {"torch": "2.10.1", "rich": "15.0.0"}}, "torch", "2.10.1"),
        ({"packages": {"torch": "2.11", "rich": None}}, "rich", "missing"),
        ({"packages": {"torch": "2.11", "rich": "16.0"}}, "rich", "16.0"),
        ({"ram_available_bytes": GIB}, "memory", "1.0 GiB free of 8.0 GiB"),
        ({"ram_available_bytes": GIB, "ram_limit_bytes": GIB}, "memory", "1.0 GiB free of 8.0 GiB (container limit)"),
    ],
)
def test_one_fault_is_one_finding_with_a_fix(good, paths, change, name, found):
    unmet, can_start = failed(replace(good, **change), paths)
    assert [key for key in unmet if not key.startswith("[")] == [name]
    assert unmet[name].found == found and unmet[name].fix and not can_start


@pytest.mark.parametrize(("index", "name"), [(0, "output disk"), (1, "cache disk")])
def test_full_disk(good, paths, index, name):
    machine = replace(good, disk_free_bytes={**good.disk_free_bytes, paths[index]: GIB})
    unmet, can_start = failed(machine, paths)
    assert name in unmet and str(paths[index]) in unmet[name].fix and not can_start


def test_output_that_cannot_be_written(good, paths):
    paths[0].write_text("a file")
    unmet, can_start = failed(good, paths)
    assert "set output_dir" in unmet["output_dir"].fix and not can_start


def test_devices_are_named(good, paths):
    gpu = Accelerator("cuda", 0, "Card", 80 * GIB, 79 * GIB)
    by_machine = [check(*paths, machine=item, declared=DECLARED) for item in (good, replace(good, accelerators=(gpu,)))]
    found = [next(item for item in findings if item.name == "device") for findings in by_machine]
    assert [item.found for item in found] == ["CPU only", "cuda:0 Card 79.0 GiB free of 80.0 GiB"]
    assert all(item.ok for item in found)


def test_not_installed_says_how_to_install(paths, monkeypatch):
    monkeypatch.setattr(requirements, "installed_version", lambda name: None)
    findings = check(*paths)
    assert [(item.name, item.ok) for item in findings] == [("scu-trainer", False)]
    assert "make deps" in render(findings)


def test_without_its_own_tools_the_check_still_answers(paths, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else real(name))
    findings = check(*paths)
    assert [item.name for item in findings] == ["rich"] and not all_required_met(findings)
    assert render(findings) == f"FIX: rich missing; {requirements.INSTALL_ALL}"


def test_the_table_fits_80_columns_and_says_what_to_do(good, paths):
    bad = replace(good, packages={**good.packages, "torch": None}, ram_available_bytes=0)
    text = render(check(*paths, machine=bad, declared=DECLARED))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if line[:3].strip() and not line.startswith(" ")} == {"ok", "FIX", "opt"}
    assert "pip install 'torch>=2.11'" in " ".join(text.split())
