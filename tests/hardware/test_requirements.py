"""Each requirement, met and unmet, on a machine that is made up."""

from __future__ import annotations

import configparser
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from scu_trainer.cli.machine.check import render
from scu_trainer.hardware import requirements
from scu_trainer.hardware.needs import RecipeNeeds, needs_of
from scu_trainer.hardware.probe import Accelerator, Machine
from scu_trainer.hardware.requirements import all_required_met, check

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


def failed(machine, paths, needs=None):
    """(names of unmet requirements by finding, whether training can start)."""
    findings = check(*paths, needs=needs, machine=machine, declared=DECLARED)
    return {finding.name: finding for finding in findings if not finding.ok}, all_required_met(findings)


def test_a_good_machine_can_start_though_an_optional_part_is_missing(good, paths):
    unmet, can_start = failed(good, paths)
    assert list(unmet) == ["[deepspeed]"] and can_start
    assert unmet["[deepspeed]"].found == "deepspeed missing, ninja 1.13.0"
    assert unmet["[deepspeed]"].fix == "pip install 'scu-trainer[deepspeed]'"
    assert not paths[0].exists() and not paths[1].exists()


def test_every_extra_for_users_is_listed():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    assert {*requirements.OPTIONAL_EXTRAS} == {*setup["options.extras_require"]} - {"all", "benchmarks", "docs"}


def test_an_extra_that_the_job_needs_is_required(good, paths):
    unmet, can_start = failed(good, paths, RecipeNeeds(extras={"deepspeed": "deepspeed", "qlora": "tuning: qlora"}))
    assert list(unmet) == ["[deepspeed]"] and not can_start
    assert unmet["[deepspeed]"].wanted == "needed by deepspeed"


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


# -- what a recipe needs -----------------------------------------------------------------------------------------------

GPU = Accelerator("cuda", 0, "Card", 80 * GIB, 79 * GIB)
APPLE = Accelerator("mps", 0, "Apple", 16 * GIB, 9 * GIB)


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({}, RecipeNeeds()),
        ({"tuning": "lora", "report_to": ["tensorboard"], "fp16": False, "attn_implementation": "sdpa"}, RecipeNeeds()),
        ({"tuning": "qlora"}, RecipeNeeds(extras={"qlora": "tuning: qlora"})),
        ({"optim": "adamw_torch_4bit"}, {"extras": {"optimizers": "optim: adamw_torch_4bit"}}),
        ({"optim": "adamw_bnb_8bit"}, {"extras": {"qlora": "optim: adamw_bnb_8bit"}}),
        ({"optim": "apollo_adamw"}, {"extras": {}, "packages": {"apollo-torch": "optim: apollo_adamw"}}),
        ({"deepspeed": "x.json", "optim": "sgd"}, {"extras": {"deepspeed": "deepspeed"}, "optim": None}),
        ({"task": "image-classification"}, {"extras": {"images": "task: image-classification"}}),
        ({"report_to": "wandb"}, {"packages": {"wandb": "report_to: wandb"}}),
        ({"report_to": ["mlflow", "none"]}, {"packages": {"mlflow": "report_to: mlflow"}}),
        (
            {"attn_implementation": "flash_attention_2"},
            {
                "packages": {"flash-attn": "attn_implementation: flash_attention_2"},
                "cuda": ("attn_implementation: flash_attention_2",),
            },
        ),
        (
            {"use_liger_kernel": True},
            {"packages": {"liger-kernel": "use_liger_kernel: true"}, "gpu": ("use_liger_kernel: true",)},
        ),
        ({"tf32": True, "max_gpu_mem": "4GB"}, {"cuda": ("tf32: true", "max_gpu_mem: 4GB"), "gpu": ()}),
        ({"fp16": True, "preset": "gpu"}, {"gpu": ("fp16: true", "preset: gpu"), "cuda": ()}),
        ({"mixed_precision": "fp16", "use_cpu": True}, {"gpu": ("mixed_precision: fp16",), "use_cpu": True}),
    ],
    ids=str,
)
def test_what_settings_ask_for(values, needs):
    found = needs_of(values)
    assert found == needs if isinstance(needs, RecipeNeeds) else {name: getattr(found, name) for name in needs} == needs


@pytest.mark.parametrize(
    ("needs", "devices", "met"),
    [
        (RecipeNeeds(gpu=("fp16: true",)), (), False),
        (RecipeNeeds(gpu=("fp16: true",)), (APPLE,), True),
        (RecipeNeeds(gpu=("fp16: true",), use_cpu=True), (GPU,), False),
        (RecipeNeeds(cuda=("tf32: true",)), (APPLE,), False),
        (RecipeNeeds(cuda=("tf32: true",)), (GPU,), True),
        (RecipeNeeds(use_cpu=True), (), True),
    ],
    ids=str,
)
def test_a_gpu_is_required_where_a_setting_needs_one(good, paths, needs, devices, met):
    unmet, can_start = failed(replace(good, accelerators=devices), paths, needs)
    assert ("device" not in unmet) == can_start == met
    if not met:
        assert unmet["device"].wanted.endswith((*needs.cuda, *needs.gpu)[0])


def test_folders_packages_and_optimizer_of_a_recipe(good, paths, tmp_path):
    folder = tmp_path / "offload"
    needs = RecipeNeeds(
        packages={"wandb": "report_to: wandb"}, folders={"offload_folder": folder}, optim="paged_adamw_8bit"
    )
    machine = replace(good, disk_free_bytes={**good.disk_free_bytes, folder: GIB})
    unmet, can_start = failed(machine, paths, needs)
    assert not can_start and {"wandb", "offload_folder disk", "optim"} <= set(unmet)
    assert "adamw" in unmet["optim"].fix and unmet["wandb"].fix == "pip install wandb"
    enough = replace(
        machine,
        disk_free_bytes={**good.disk_free_bytes, folder: 5 * GIB},
        packages={**good.packages, "wandb": "0.20"},
        accelerators=(GPU,),
    )
    assert failed(enough, paths, replace(needs, optim="adamw_torch"))[1]
