"""Which optimizer runs where: each refusal and its advice, and the table against transformers' own names."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import warnings

import pytest
import torch
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, OptimizerContext
from transformers.training_args import OptimizerNames

from scu_trainer.errors import RequirementError
from scu_trainer.hardware.optimizers import OPTIMIZERS, check_optimizer
from tests.tiny import arguments


def everything(name: str) -> str:
    return "1.0"


def nothing(name: str) -> None:
    return None


def without(*absent: str):
    return lambda name: None if name in absent else "1.0"


def refusal(optim: str, device: str, capability=None, installed=everything, **changes) -> str:
    with pytest.raises(RequirementError) as found:
        check_optimizer(optim, device, capability, installed, **{"find_program": everything, **changes})
    return str(found.value)


def nearest_in(message: str) -> str:
    return message.rpartition("Nearest that runs here: optim: ")[2]


def test_every_name_of_transformers_has_an_entry_and_no_other():
    assert set(OPTIMIZERS) == {name.value for name in OptimizerNames}


def test_all_advice_names_an_optimizer():
    assert all(name in OPTIMIZERS for needs in OPTIMIZERS.values() for name in needs.instead)


@pytest.mark.parametrize("optim", sorted(OPTIMIZERS))
def test_advice_is_always_something_that_runs(optim):
    needs = OPTIMIZERS[optim]
    devices = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "xla")
    for device, installed, find_program in itertools.product(devices, (everything, nothing), (everything, nothing)):
        options = {"capability": (6, 1) if device == "cuda" else None}
        options |= {"installed": installed, "find_program": find_program}
        try:
            check_optimizer(optim, device, **options)
        except RequirementError as error:
            assert nearest_in(str(error)) != optim
            check_optimizer(nearest_in(str(error)), device, **options)
        else:
            assert needs.devices is None or device in needs.devices
            assert installed is everything or not needs.packages


@pytest.mark.parametrize(
    ("optim", "device", "reason", "nearest"),
    [
        ("paged_adamw_8bit", "cpu", "does not run on cpu, only on cuda, xpu", "adamw_bnb_8bit"),
        ("paged_adamw_32bit", "cpu", "does not run on cpu", "adamw_torch_fused"),
        ("paged_lion_8bit", "cpu", "does not run on cpu", "lion_8bit"),
        ("paged_ademamix_32bit", "cpu", "does not run on cpu", "ademamix"),
        ("adamw_bnb_8bit", "mps", "does not run on mps", "adamw_torch_8bit"),
        ("adamw_torch_xla", "cpu", "only on xla", "adamw_torch_fused"),
        ("adamw_torch_npu_fused", "cuda", "only on npu", "adamw_torch_fused"),
        ("galore_adamw_8bit", "cpu", "only on cuda", "galore_adamw"),
        ("adalomo", "cpu", "only on cuda", "adafactor"),
        ("adamw_torch_fused", "xla", "does not run on xla", "adamw_torch"),
    ],
)
def test_a_device_that_cannot_is_refused_with_the_closest_in_kind(optim, device, reason, nearest):
    message = refusal(optim, device)
    assert message.startswith(f"optim: {optim} ") and reason in message
    assert nearest_in(message) == nearest


@pytest.mark.parametrize(
    ("optim", "package", "nearest"),
    [
        ("adamw_8bit", "bitsandbytes", "adamw_torch_8bit"),
        ("adamw_torch_8bit", "torchao", "adamw_bnb_8bit"),
        ("galore_adamw", "galore-torch", "apollo_adamw"),
        ("apollo_adamw_layerwise", "apollo-torch", "galore_adamw"),
        ("lomo", "lomo-optim", "sgd"),
        ("grokadamw", "grokadamw", "adamw_torch_fused"),
        ("stable_adamw", "torch-optimi", "adamw_torch_fused"),
        ("schedule_free_sgd", "schedulefree", "sgd"),
    ],
)
def test_a_missing_package_is_named_with_what_to_type(optim, package, nearest):
    message = refusal(optim, "cuda", (9, 0), without(package))
    assert f"needs {package}, not installed here (pip install {package})" in message
    assert nearest_in(message) == nearest
    check_optimizer(optim, "cuda", (9, 0), everything)


def test_a_package_that_cannot_be_installed_is_not_advised():
    message = refusal("adamw_anyprecision", "cuda", (9, 0), without("torchdistx"))
    assert "pip install" not in message and nearest_in(message) == "adamw_torch_8bit"


def test_old_cuda_cards_cannot_compile_the_update():
    message = refusal("adamw_torch_4bit", "cuda", (6, 1))
    assert "capability 7.0; this one has 6.1" in message and nearest_in(message) == "adamw_bnb_8bit"
    check_optimizer("adamw_torch_4bit", "cuda", (7, 0), everything)


def test_compiling_on_a_cpu_takes_a_compiler(monkeypatch):
    message = refusal("adamw_torch_8bit", "cpu", find_program=nothing)
    assert "install g++, or set CXX" in message and nearest_in(message) == "adamw_bnb_8bit"
    check_optimizer("adamw_torch_8bit", "cuda", (9, 0), everything, find_program=nothing)
    monkeypatch.setenv("CXX", "/opt/own/c++")
    check_optimizer(
        "adamw_torch_8bit", "cpu", None, everything, find_program=lambda name: name == "/opt/own/c++" or None
    )


def test_deepspeed_offload_moves_the_update_to_the_cpu():
    message = refusal("paged_adamw_8bit", "cuda", (9, 0), deepspeed_offload=True)
    assert "DeepSpeed's optimizer offload" in message and nearest_in(message) == "adamw_bnb_8bit"
    check_optimizer("paged_adamw_8bit", "cuda", (9, 0), everything)
    check_optimizer("adamw_torch_8bit", "cuda", (6, 1), everything, True, everything)  # the card does not matter


def test_unknown_names_are_left_to_transformers():
    check_optimizer("adamw_of_mine", "cpu")


def test_what_updates_in_backward():
    found = {name for name, needs in OPTIMIZERS.items() if needs.in_backward}
    assert found == {name for name in OPTIMIZERS if "lomo" in name or name.endswith("layerwise")}


def test_nothing_imports_torch():
    program = (
        "import sys, scu_trainer.hardware.optimizers, scu_trainer.hardware.precision; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def runs_here() -> list[str]:
    """What the table says runs on this CPU; torchao's compile, some seconds each, has a test of its own."""
    names = []
    for name, needs in OPTIMIZERS.items():
        try:
            check_optimizer(name, "cpu")
        except RequirementError:
            continue
        if not needs.compiles and not needs.in_backward and not name.startswith(("galore", "apollo")):
            names.append(name)
    return names


@pytest.fixture
def no_overrides(monkeypatch):
    """bitsandbytes keeps, for the whole process, which parameters by number an earlier Trainer has set to 32 bits."""
    if importlib.util.find_spec("bitsandbytes"):
        from bitsandbytes.optim import GlobalOptimManager

        monkeypatch.setattr(GlobalOptimManager, "_instance", None)


@pytest.mark.usefixtures("no_overrides")
@pytest.mark.parametrize("optim", runs_here())
def test_what_may_run_on_a_cpu_really_steps_without_a_warning(optim, tmp_path):
    weight = torch.nn.Parameter(torch.full((128, 64), 0.5))
    context = OptimizerContext(
        arguments(tmp_path, optim=optim), None, {"lr": 1e-2}, {"betas": (0.9, 0.999), "eps": 1e-8}, {}
    )
    kind, options = _OPTIMIZER_HANDLERS[OptimizerNames(optim)](context)
    optimizer = kind([weight], **options)
    if hasattr(optimizer, "train"):  # as the stock Trainer does before each step
        optimizer.train()
    for _ in range(8):  # RAdam takes none of the first five
        weight.grad = weight.detach().clone()
        optimizer.step()
    assert (weight < 0.5).all()
    state = {
        value.dtype for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.numel() > 8000
    }
    assert (torch.uint8 in state) == ("8bit" in optim)


def test_paged_state_on_a_cpu_would_not_be_paged():
    """Why it is refused: if this fails, bitsandbytes has learnt it, and the table should know."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    weight = torch.nn.Parameter(torch.ones(512, 512))
    weight.grad = torch.ones_like(weight)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = bitsandbytes.optim.PagedAdamW8bit([weight])
        optimizer.step()
    assert any("not supported on CPU" in str(warning.message) for warning in caught)
    assert not getattr(optimizer.state[weight]["state1"], "is_paged", False)
