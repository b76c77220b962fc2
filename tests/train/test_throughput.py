"""Samples per second and utilization: counts by hand, time by an injected clock, a training that is the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from scu_trainer.hardware.presets import known_tflops
from scu_trainer.models.memory_format import apply_channels_last
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.loops import flops, throughput
from scu_trainer.train.loops.flops import count_flops
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import Rows, UnevenRows, arguments, conv_net, images, llama, lora, pad, same, trained
from tests.train.stepwise import Recorder

ON = EfficiencySettings(throughput=True, peak_tflops=0.001)


class Clock:
    """Every look at it is one second later."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1.0
        return self.now_s


class SlowBetweenSteps(TrainerCallback):
    """Evaluations and checkpoints take 100 seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_evaluate(self, args, state, control, **kwargs):
        self.clock.now_s += 100

    on_save = on_evaluate


class Recurrent(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.cell = kind(4, 8, batch_first=True)

    def forward(self, x, labels):
        return {"loss": (self.cell(x)[0].mean(dim=(1, 2)) - labels).square().mean()}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)

    def forward(self, x, labels):
        return {"loss": (self.second(self.first(x)).sum(dim=1) - labels).square().mean()}


def counted(model, batch, tmp_path, **changes):
    trainer = SCUTrainer(model, arguments(tmp_path), **changes)
    return count_flops(trainer, batch, None)


def test_two_layers_counted_by_hand(tmp_path):
    """Forward 2 per multiply-add; backward twice that, but the first layer's input needs no gradient."""
    model, batch = Linear(), {"x": torch.ones(7, 6), "labels": torch.ones(7)}
    found, reason = counted(model, batch, tmp_path)
    assert reason is None and found.rows == 2
    assert found.flops == 2 * 2 * (3 * 5 * 3 + 2 * 6 * 5)
    model.first.weight.requires_grad_(False)
    assert counted(model, batch, tmp_path)[0].flops == 2 * 2 * (2 * 5 * 3 - 5 * 3 + 6 * 5 + 5 * 3)


@pytest.mark.parametrize(("kind", "gates"), [(nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers_are_counted(tmp_path, kind, gates):
    batch = {"x": torch.randn(2, 5, 4), "labels": torch.zeros(2)}
    found, _ = counted(Recurrent(kind), batch, tmp_path)
    forward = 2 * 2 * 5 * gates * 8 * (4 + 8)
    assert 2 * forward < found.flops <= 3 * forward


def test_padding_and_rows_scale_the_count(tmp_path):
    rows = pad([UnevenRows()[i] for i in range(6)])
    found, _ = counted(llama(layers=1), rows, tmp_path)
    assert found.tokens == rows["input_ids"][:2].numel()
    assert found.of(10, 3.0) == pytest.approx(3 * found.flops / found.tokens)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, heat_curve, heat_mask, part_mask, labels):
        found = (self.linear(heat_curve).sum(dim=2) * heat_mask).sum(dim=1)
        return {"loss": (found * part_mask.any(dim=1) - labels).square().mean()}


def test_padding_under_masks_is_not_counted(tmp_path):
    """Two rows of 5 and 3 steps beside one of 50."""
    mask = torch.arange(50) < torch.tensor([[5], [3], [50]])
    parts = torch.tensor([[True, False]] * 3)
    batch = {"heat_curve": torch.randn(3, 50, 4), "heat_mask": mask, "part_mask": parts, "labels": torch.zeros(3)}
    found, reason = counted(Sequences(), batch, tmp_path)
    assert reason is None and found.flops == 2 * 2 * (2 * 5 * 4 * 3)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_is_computed_twice_counts_once(tmp_path, checkpointed):
    model = llama(layers=2)
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    found, _ = counted(model, pad([Rows()[0], Rows()[1]]), tmp_path)
    assert found.flops == counted(llama(layers=2), pad([Rows()[0], Rows()[1]]), tmp_path)[0].flops


def test_a_model_that_cannot_be_counted_says_so(tmp_path):
    class Stubborn(Linear):
        def forward(self, x, labels):
            if len(x) < 3:
                raise RuntimeError("three rows or none")
            return super().forward(x, labels)

    found, reason = counted(Stubborn(), {"x": torch.ones(7, 6), "labels": torch.ones(7)}, tmp_path)
    assert found is None and "three rows or none" in reason


MODELS = {
    "dropout": lambda: (llama(layers=1, attention_dropout=0.2), {}),
    "lora": lambda: (lora(llama(layers=1), lora_dropout=0.2), {}),
    "batch norm": lambda: (conv_net(), {"dataset": images()}),
    "chunked": lambda: (llama(layers=1), {"memory": MemorySettings(token_cap=24, memory_control=False)}),
    "curriculum": lambda: (llama(layers=1), {"curriculum": CurriculumSettings("noise_guard")}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_training_is_the_same_bit_for_bit(tmp_path, kind):
    off, on = Recorder(), Recorder()
    for recorder, settings in ((off, None), (on, ON)):
        model, changes = MODELS[kind]()
        trainer = trained(model, tmp_path, efficiency=settings, callbacks=[recorder], **changes)
    assert trainer.loop("throughput").count is not None
    for what in ("gradients", "weights", "buffers"):
        assert all(same(a, b) for a, b in zip(getattr(off, what), getattr(on, what), strict=True))


def test_rates_by_a_clock(tmp_path, monkeypatch):
    """Each timed step is one second: 2 batches of 4 rows with 16 tokens."""
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": Rows(4)}
    settings = {"gradient_accumulation_steps": 2, "logging_steps": 2, "save_strategy": "steps", "save_steps": 3}
    trainer = trained(
        llama(layers=1), tmp_path, efficiency=ON, callbacks=[SlowBetweenSteps(clock)], **settings, **evaluated
    )
    figures, count = trainer.loop("throughput").measured(), trainer.loop("throughput").count
    assert (figures["samples_per_second"], figures["tokens_per_second"]) == (8.0, 128.0)
    assert figures["tflops"] == pytest.approx(128 * count.flops / count.tokens / 1e12)
    assert figures["mfu"] == pytest.approx(figures["tflops"] / 0.001)
    logs = [entry for entry in trainer.state.log_history if "throughput/mfu" in entry]
    assert [entry["step"] for entry in logs] == [2, 4, 6]
    assert all(entry["throughput/samples_per_second"] == 8.0 for entry in logs)


def test_tokens_are_added_up_as_they_come(tmp_path):
    trainer = trained(llama(layers=1), tmp_path, efficiency=ON, gradient_accumulation_steps=2, max_steps=3)
    assert trainer.loop("throughput")._whole_training.tokens == 2 * 2 * 64


def test_padding_is_no_work(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "time", Clock())
    rows = UnevenRows(4)
    trainer = trained(llama(layers=1), tmp_path, efficiency=ON, dataset=rows, data_collator=pad)
    assert trainer.loop("throughput").measured()["tokens_per_second"] == sum(
        len(rows[i]["input_ids"]) for i in range(4)
    )


# -- peaks and lines ---------------------------------------------------------------------------------------------------


def test_known_cards():
    assert known_tflops("NVIDIA H200 NVL", "bf16") == known_tflops("NVIDIA H100 NVL", "fp16") == 835.5
    assert known_tflops("NVIDIA GH200 480GB", "bf16") == 989.4
    assert known_tflops("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16") is None
    assert known_tflops("NVIDIA H200", "bf16") == 989.4
    assert known_tflops("NVIDIA H100 80GB HBM3", "tf32") == 494.7
    assert known_tflops("NVIDIA H100 PCIe", "bf16") == 756.5
    assert known_tflops("NVIDIA A100-SXM4-80GB", "bf16") == 312.0
    assert known_tflops("NVIDIA A10", "fp32") == 31.2
    assert known_tflops("NVIDIA A10G", "fp32") is None
    assert known_tflops("Tesla T4", "bf16") is None


def test_the_peak_of_a_cpu_is_measured_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(flops, "time", Clock())
    trainer = SCUTrainer(llama(layers=1), arguments(tmp_path))
    peak, reason = flops.find_peak(trainer, None)
    assert reason is None and peak.source == "measured matmul peak, fp32"
    assert peak.tflops == pytest.approx(2 * 1024**3 / 1e12)
    assert flops.precision_of(SCUTrainer(llama(layers=1), arguments(tmp_path, bf16=True))) == "bf16"
    assert flops.precision_of(SCUTrainer(llama(layers=1).bfloat16(), arguments(tmp_path))) == "bf16"


@pytest.mark.parametrize(
    ("model", "capability", "stated", "expected"),
    [
        (conv_net, (9, 0), None, "tf32"),
        (conv_net, (7, 5), None, "fp32"),
        (lambda: llama(layers=1), (9, 0), None, "fp32"),
        (lambda: llama(layers=1), (9, 0), "tf32", "tf32"),
    ],
)
def test_tf32_is_told_from_fp32(tmp_path, monkeypatch, model, capability, stated, expected):
    """Convolutions are rounded to TF32 by default; products where ``torch.backends.fp32_precision`` says so."""
    trainer = SCUTrainer(model(), arguments(tmp_path))
    monkeypatch.setattr(flops, "input_device", lambda model: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if stated:
        monkeypatch.setattr(torch.backends, "fp32_precision", stated)
    assert flops.precision_of(trainer) == expected


def test_lines_of_the_table(tmp_path):
    loop = trained(llama(layers=1), tmp_path, efficiency=ON, max_steps=1).loop("throughput")
    assert loop.lines({}) == []
    figures = loop.measured()
    assert loop.lines({"throughput": figures}) == [("throughput", "not measured: a run of one step")]
    figures |= {"samples_per_second": 1234.5, "tokens_per_second": None, "tflops": 0.0005, "mfu": 0.5}
    (_, rates), (_, share) = loop.lines({"throughput": figures})
    assert rates == "1,234.5 samples per second"
    assert share.startswith("50.0%: 0.5 GFLOP/s") and "of 1 GFLOP/s (peak_tflops)" in share


# -- channels last -----------------------------------------------------------------------------------------------------


def test_channels_last_gives_the_same_numbers_and_files(tmp_path):
    plain, changed = Recorder(), Recorder()
    sgd = {"dataset": images(), "optim": "sgd", "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 6}
    trained(conv_net(), tmp_path / "plain", callbacks=[plain], **sgd)
    settings = EfficiencySettings(channels_last=True)
    trainer = trained(conv_net(), tmp_path / "changed", efficiency=settings, callbacks=[changed], **sgd)
    assert trainer.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not trainer.model.conv.weight.is_contiguous()
    for a, b in zip(plain.weights, changed.weights, strict=True):
        assert all(torch.allclose(a[name], b[name], rtol=1e-5, atol=1e-6) for name in a)
    resumed = {"efficiency": settings, "resume": str(tmp_path / "changed" / "checkpoint-6"), "max_steps": 7}
    assert trained(conv_net(), tmp_path / "changed", **{**sgd, **resumed}).state.global_step == 7


def test_pictures_enter_with_channels_last_and_nothing_else_changes():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    seen = []
    assert apply_channels_last(model) == 1
    model[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(torch.randn(2, 3, 8, 8))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert all(tensor.is_contiguous() for tensor in model.state_dict().values())
    assert apply_channels_last(nn.Linear(2, 2)) == 0


def test_videos(tmp_path):
    torch.manual_seed(0)
    model, video = nn.Sequential(nn.Conv3d(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 5, 8, 8)
    expected = model(video)
    assert apply_channels_last(model) == 1
    torch.testing.assert_close(model(video), expected)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_a_model_without_convolutions_is_said(tmp_path, caplog):
    trained(llama(layers=1), tmp_path, efficiency=EfficiencySettings(channels_last=True), max_steps=1)
    assert "no convolution" in caplog.text
