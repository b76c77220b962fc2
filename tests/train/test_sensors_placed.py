"""Where the weights of TRIDENT lie: device_map, branches on a device of their own, DeepSpeed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from safetensors.torch import load_file

from scu_trainer.cli import train
from scu_trainer.data.sensors.synthetic import export_synthetic
from scu_trainer.errors import SettingsError
from scu_trainer.models.sensors.placing import device_refusal, place_branches
from scu_trainer.run_files import read_json
from scu_trainer.settings.sensors import BRANCHES, SensorSettings
from tests import processes
from tests.recordings import trident
from tests.train.test_sensors import job_of, load, words_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "recordings"
    export_synthetic(folder, samples=32, classes=4)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory, recordings):
    """A trained model, by the command."""
    return trained(tmp_path_factory.mktemp("base") / "run", recordings)


def trained(folder: Path, recordings: Path, **changes) -> Path:
    assert train.main(words_of(folder, recordings, **changes)) == 0
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = [*run.glob("adapter_model.safetensors"), *run.glob("model.safetensors")]
    return load_file(file)


def same(first: Path, second: Path) -> bool:
    one, two = weights(first), weights(second)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# -- device_map --------------------------------------------------------------------------------------------------------


def test_a_model_that_fits_is_trained_the_same_with_a_device_map(tmp_path, recordings):
    """From scratch: the random weights are written first, and read to where they belong."""
    given = {"cache_dir": tmp_path / "cache"}
    plain = trained(tmp_path / "plain", recordings, **given)
    mapped = trained(tmp_path / "mapped", recordings, device_map="auto", **given)
    assert same(plain, mapped) and len([*(tmp_path / "cache" / "starts").glob("*/model.safetensors")]) == 1


def test_adapters_over_weights_on_disk_are_adapters_over_weights_in_memory(tmp_path, recordings, base, capsys):
    """Branches with convolutions, attention and learned queries go there; the head, which is trained, does not."""
    given = {"tuning": "lora", "lora_r": 2, "model_name_or_path": base, "learning_rate": 1e-2}
    plain = trained(tmp_path / "plain", recordings, **given)
    capsys.readouterr()
    away = {**given, "device_map": "auto", "cpu_mem": "24KB", "offload_folder": tmp_path / "disk"}
    offloaded = trained(tmp_path / "away", recordings, **away)
    assert " on disk" in capsys.readouterr().out
    assert same(plain, offloaded)
    model = load(job_of(tmp_path / "look", recordings, **away)).model
    places = {name: weight.is_meta for name, weight in model.named_parameters()}
    assert any(places.values()) and any("fusion" in name for name, is_away in places.items() if is_away)
    assert not any(is_away for name, is_away in places.items() if "classifier" in name or "lora_" in name)


def test_weights_that_are_all_trained_lie_where_they_are_computed(tmp_path, recordings):
    away = {"device_map": "auto", "cpu_mem": "24KB", "offload_folder": tmp_path / "disk"}
    with pytest.raises(SettingsError, match="tuning: full trains every weight"):
        load(job_of(tmp_path / "run", recordings, cache_dir=tmp_path / "cache", **away))


def test_limits_without_a_device_map_are_refused(tmp_path, recordings):
    with pytest.raises(SettingsError, match="cpu_mem: these limit what device_map may use, but it is not set"):
        job_of(tmp_path / "run", recordings, cpu_mem="1MB").check()


# -- branches on a device of their own ---------------------------------------------------------------------------------


def test_a_branch_with_a_device_trains_the_same(tmp_path, recordings, capsys):
    every = {"branches": "kinematics cooling geometry"}
    plain = trained(tmp_path / "plain", recordings, **every)
    capsys.readouterr()
    apart = trained(tmp_path / "apart", recordings, branch_devices='{"geometry":"cpu","cooling":"cpu"}', **every)
    assert "branches: geometry on cpu, cooling on cpu; all else on cpu" in capsys.readouterr().out
    assert same(plain, apart)
    assert read_json(apart / "scu_metrics.json")["steps"] == 3


def test_inputs_go_to_the_device_of_a_branch_and_tokens_come_back():
    """The meta device stands for another one: it holds shapes alone, and those arrive there."""
    model = trident(branches=list(BRANCHES))
    place_branches(model, {"geometry": "meta"}, torch.device("cpu"))
    geometry = model.trident.branches["geometry"]
    assert isinstance(geometry._hf_hook, AlignDevicesHook) and geometry._hf_hook.io_same_device
    assert {name for name, weight in model.named_parameters() if weight.is_meta} == {
        f"trident.branches.geometry.{name}" for name, _ in geometry.named_parameters()
    }
    moved, _ = geometry._hf_hook.pre_forward(geometry, torch.ones(2, 1, 4), torch.ones(2, 1, dtype=torch.bool))
    assert [value.device.type for value in moved] == ["meta", "meta"]
    assert geometry._hf_hook.input_device.type == "cpu"
    assert model.hf_device_map == {"": torch.device("cpu"), "trident.branches.geometry": torch.device("meta")}


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cpu", None),
        ("meta", "holds shapes without values"),
        ("gpu", "'gpu' is not a device"),
        ("xla", "is neither"),
        ("cuda:99", "here for cuda:99; give cpu"),
    ],
)
def test_devices_on_which_no_branch_can_lie(device, reason):
    assert device_refusal(device) is None if reason is None else reason in device_refusal(device)


REFUSED = [
    ({"branch_devices": '{"kinematics":"meta"}'}, "branch_devices puts kinematics on meta: the meta device holds"),
    ({"branch_devices": '{"geometry":"cpu"}'}, "branch_devices has 'geometry', but the model has visible, infrared"),
    ({"branch_devices": '{"visible":"cpu"}', "device_map": "auto"}, "branch_devices and device_map both decide"),
    ({"branch_devices": '{"visible":"cpu"}', "tuning": "qlora"}, "branch_devices moves layers in full precision"),
    ({"branch_devices": '{"visible":"cpu"}', "torch_compile": "true"}, "set torch_compile: false, or drop"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_placements_that_contradict_each_other_are_refused(tmp_path, recordings, changes, message):
    with pytest.raises(SettingsError, match=message):
        job_of(tmp_path / "run", recordings, **changes).check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("geometry", "branch_devices is 'geometry'; give something like"),
        ({"fusion": "cpu"}, "branch_devices has 'fusion'; allowed: visible"),
        ({"geometry": 1}, "branch_devices has 1 for geometry"),
        ({}, "branch_devices is {}"),
    ],
)
def test_devices_are_a_mapping_of_branches(given, message):
    with pytest.raises(SettingsError, match=message):
        SensorSettings(branches=["geometry"], branch_devices=given)
    assert SensorSettings(branches=["geometry"], branch_devices='{"geometry":"cpu"}').branch_devices == {
        "geometry": "cpu"
    }


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def test_deepspeed_trains_what_plain_python_trains(tmp_path, recordings):
    """What `make train-sensors-deepspeed` runs, shortened: ZeRO-2 with the optimizer in main memory."""
    pytest.importorskip("deepspeed")
    given = {"branches": "kinematics cooling geometry", "logging_steps": 1}
    plain = trained(tmp_path / "plain", recordings, **given)
    zero = words_of(tmp_path / "zero", recordings, deepspeed=ROOT / "ds_configs" / "zero2_offload.json", **given)
    launch = ["-m", "scu_trainer.cli.main", "launch", "deepspeed", "--processes", "1"]
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"), "PATH": paths}
    done = processes.launch([*launch, *zero], environment=environment)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    one, two = (read_json(folder / "trainer_state.json")["log_history"] for folder in (plain, tmp_path / "zero"))
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (one, two)]
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-4)
