"""Automatic precision: rules on made-up devices, exhaustively where they are few, and the facts of this machine."""

from __future__ import annotations

import itertools

import pytest
import torch

from scu_trainer.errors import RequirementError, SettingsError, UserError
from scu_trainer.hardware.precision import DeviceFacts, choose_precision, cpu_facts, device_facts, tf32_default

H100 = DeviceFacts("cuda", True, (9, 0), "this GPU has it")
T4 = DeviceFacts("cuda", False, (7, 5))
P100 = DeviceFacts("cuda", False, (6, 0))
OLD_AMD = DeviceFacts("cuda")
NEW_CPU = cpu_facts({"avx512_bf16": True, "amx_bf16": False})
OLD_CPU = cpu_facts({"avx512_bf16": False, "cpu_name": "old"})
MPS = DeviceFacts("mps")
DEVICES = (H100, T4, P100, OLD_AMD, NEW_CPU, OLD_CPU, MPS)


def chosen(device, wanted="auto", bf16=False, fp16=False, launcher=None):
    return choose_precision(wanted, bf16, fp16, launcher, device)


@pytest.mark.parametrize(
    ("device", "name", "reason"),
    [
        (H100, "bf16", "bf16 autocast (this GPU has it)"),
        (T4, "fp16", "fp16 autocast (this GPU has no bf16)"),
        (P100, "no", "float32 (this GPU has neither bf16 nor fast fp16)"),
        (OLD_AMD, "no", "float32 (this GPU has neither bf16 nor fast fp16)"),
        (NEW_CPU, "bf16", "bf16 autocast (this CPU has avx512_bf16)"),
        (OLD_CPU, "no", "float32 (this CPU has no bf16 instructions)"),
        (MPS, "no", "float32 (autocast was not measured on mps; mixed_precision: bf16 is worth trying)"),
    ],
)
@pytest.mark.parametrize("launcher", [None, "no"])
def test_unasked_the_fastest_safe_format_is_taken(device, name, reason, launcher):
    choice = chosen(device, launcher=launcher)
    if launcher == "no" and name != "no":  # whoever meant it reads how to have it
        note = (
            "the launcher's mixed_precision: no is not followed, because accelerate sets it by default: set "
            "mixed_precision: no in the job to turn half precision off"
        )
        reason = f"{reason[:-1]}; {note})"
    assert (choice.name, choice.reason) == (name, reason)


def requests(wanted, bf16, fp16, launcher) -> set[str]:
    found = {wanted} - {"auto"} | ({launcher} - {None, "no"})
    return found | ({"bf16"} if bf16 else set()) | ({"fp16"} if fp16 else set())


def impossible(name, device) -> bool:
    return (name == "fp16" and device.kind == "cpu") or (name == "bf16" and device.kind == "cuda" and not device.bf16)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_all_combinations(device):
    """A request wins, two different ones contradict each other, and nothing that cannot be done is done silently."""
    combinations = itertools.product(
        ("auto", "no", "bf16", "fp16"), (False, True), (False, True), (None, "no", "bf16", "fp16")
    )
    for combination in combinations:
        asked = requests(*combination)
        if len(asked) > 1:
            with pytest.raises(SettingsError, match="contradict"):
                choose_precision(*combination, device)
        elif asked and impossible(next(iter(asked)), device):
            with pytest.raises(RequirementError):
                choose_precision(*combination, device)
        else:
            choice = choose_precision(*combination, device)
            assert choice.name == (next(iter(asked)) if asked else chosen(device).name)


@pytest.mark.parametrize(
    ("device", "request_", "text"),
    [
        (H100, {"wanted": "no", "bf16": True}, "mixed_precision: no and bf16: true contradict"),
        (H100, {"fp16": True, "launcher": "bf16"}, "fp16: true and the launcher's mixed_precision: bf16 contradict"),
        (H100, {"bf16": True, "fp16": True}, "bf16: true and fp16: true contradict"),
        (H100, {"launcher": "fp8"}, "launcher asks for mixed_precision: fp8; allowed: no, bf16, fp16"),
        (T4, {"bf16": True}, "bf16: true, but this GPU has no bf16; use mixed_precision: fp16"),
        (NEW_CPU, {"fp16": True}, "no fp16 training on a CPU .* use mixed_precision: bf16"),
        (OLD_CPU, {"launcher": "fp16"}, "launcher's mixed_precision: fp16, but there is no fp16"),
    ],
)
def test_refusals_say_who_asks_and_what_to_type(device, request_, text):
    with pytest.raises(UserError, match=text):
        chosen(device, **request_)


def test_reasons_of_what_was_asked_for():
    assert chosen(T4, wanted="fp16").reason == "fp16 autocast (mixed_precision: fp16)"
    assert chosen(H100, launcher="bf16").reason == "bf16 autocast (the launcher's mixed_precision: bf16)"
    assert chosen(H100, wanted="no").reason == "arithmetic in the type of the weights (mixed_precision: no)"
    assert "slower than float32" in chosen(OLD_CPU, bf16=True).reason
    assert "slower" not in chosen(NEW_CPU, bf16=True).reason


def test_tf32_from_ampere_on():
    assert tf32_default(H100) is True
    assert [tf32_default(device) for device in DEVICES if device is not H100] == [None] * (len(DEVICES) - 1)
    assert tf32_default(H100, False) is False and tf32_default(NEW_CPU, False) is False
    assert tf32_default(H100, True) is True


@pytest.mark.parametrize("device", [device for device in DEVICES if device is not H100], ids=str)
def test_tf32_where_there_is_none_is_refused_early(device):
    with pytest.raises(RequirementError, match="Ampere"):
        tf32_default(device, True)


def test_amx_is_named_before_avx512():
    assert cpu_facts({"avx512_bf16": True, "amx_bf16": True}).detail == "this CPU has amx_bf16"


def test_the_facts_of_this_cpu():
    facts = device_facts(use_cpu=True)
    capabilities = torch.cpu.get_capabilities()
    assert facts.kind == "cpu" and facts.capability is None
    assert facts.bf16 == bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@pytest.mark.parametrize("version", ["13.0", None])
@pytest.mark.parametrize("bf16", [True, False])
def test_the_facts_of_a_gpu(monkeypatch, version, bf16):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: asked.append(how) or bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.version, "cuda", version)
    facts = device_facts(use_cpu=False)
    assert (facts.kind, facts.bf16, facts.capability) == ("cuda", bf16, (8, 6) if version else None)
    assert asked == [{"including_emulation": False}]
    assert device_facts(use_cpu=True).kind == "cpu"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # accelerate launch --cpu
    assert device_facts(use_cpu=False).kind == "cpu"


def test_the_facts_of_a_mac(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device_facts(use_cpu=False) == DeviceFacts("mps")
