"""Settings that make training cheaper or show its cost. Those that change it are off unless a task turns them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from scu_trainer.settings.base import Allowed, as_typed, check_fields, option, require

if TYPE_CHECKING:
    from transformers import TrainingArguments

GIVES_WAY = ("linear", "constant", "constant_with_warmup")
"""Values of ``lr_scheduler_type`` allowed with lr_step_size and lr_milestones: the default, and constant ones."""

ALLOWED = {
    "ema_decay": Allowed(above=0, below=1),
    "peak_tflops": Allowed(above=0),
    "lr_step_size": Allowed(least=1),
    "lr_gamma": Allowed(above=0),
}


@dataclass(frozen=True)
class EfficiencySettings:
    """Averages of the weights, memory layout, steps of the learning rate, and measurements and predictions of cost."""

    ema_decay: Optional[float] = option(
        None,
        "keep an exponential moving average of the trained weights with this decay, for instance 0.999; "
        "evaluations and the final model use the average, checkpoints also keep the weights themselves",
    )
    use_muon: bool = option(
        False,
        "use Muon for the matrices inside the model, and AdamW for embeddings, output layer, norms and biases, with "
        "the same learning rate",
    )
    channels_last: bool = option(False, "store images and convolution filters in the channels-last memory format")
    cudnn_benchmark: bool = option(
        False,
        "on CUDA, let cuDNN time its convolution algorithms for each new image size and use the fastest; for images "
        "of few sizes; results may differ between runs in the last bits",
    )
    keep_freed_memory: bool = option(
        False,
        "on a CPU, keep the memory that a step frees for the next step, so that the system does not zero it again",
    )
    lr_step_size: Optional[int] = option(
        None, "multiply the learning rate by lr_gamma every this many epochs (torch's StepLR)"
    )
    lr_milestones: Optional[list[float]] = option(
        None,
        "when to multiply the learning rate by lr_gamma (torch's MultiStepLR): epochs such as 30 60 80, or shares of "
        "the run, all below 1, such as 0.5 0.75",
    )
    lr_gamma: float = option(0.1, "factor for lr_step_size and lr_milestones")
    throughput: bool = option(
        False,
        "log samples and tokens per second, and count the operations of a training step to log FLOP/s and their share "
        "of the device's peak",
    )
    peak_tflops: Optional[float] = option(
        None,
        "peak of one device in TFLOP/s, for throughput; default: the manufacturer's figure for a known GPU, a measured "
        "matrix product on a CPU",
    )
    predict_memory: bool = option(
        True,
        "before training, run a step on shapes without data (a few seconds at most) and report how much memory it "
        "should take; scu_metrics.json has the prediction and the measurement",
    )
    profile_steps: int = option(
        0, "record this many optimizer steps, after a short warm-up, with the PyTorch profiler: logs/profile/"
    )

    def __post_init__(self) -> None:
        check_fields(self, ALLOWED)
        require(
            self.peak_tflops is None or self.throughput,
            "peak_tflops has an effect only with throughput; add throughput: true",
        )
        self._check_schedule()

    def _check_schedule(self) -> None:
        size, milestones, gamma = self.lr_step_size, self.lr_milestones, self.lr_gamma
        require(gamma == 0.1 or self.has_lr_steps, "lr_gamma needs lr_step_size or lr_milestones; give one of them")
        require(
            size is None or milestones is None, "lr_step_size and lr_milestones are two schedules; keep one of them"
        )
        if milestones is None:
            return
        require(bool(milestones), "lr_milestones is empty; give epochs such as 30 60 80, or leave it out")
        require(
            all(m > 0 for m in milestones) and sorted(set(milestones)) == list(milestones),
            f"lr_milestones are {milestones}; they must be above 0 and rise, such as 30 60 80",
        )
        require(
            self.milestones_are_shares or min(milestones) >= 1,
            f"lr_milestones are {milestones}; give epochs (1 or more) or shares of the run (below 1), not both",
        )

    @property
    def has_lr_steps(self) -> bool:
        return self.lr_step_size is not None or self.lr_milestones is not None

    @property
    def milestones_are_shares(self) -> bool:
        return self.lr_milestones is not None and max(self.lr_milestones) < 1


def check_efficiency(efficiency: EfficiencySettings, training: TrainingArguments) -> None:
    """Raise SettingsError for settings that contradict the stock arguments."""
    require(
        efficiency.ema_decay is None or not (training.load_best_model_at_end and training.save_only_model),
        "ema_decay and load_best_model_at_end need the averages of the best checkpoint, but save_only_model does not "
        "save them; drop save_only_model",
    )
    require(
        not (efficiency.cudnn_benchmark and training.full_determinism),
        "cudnn_benchmark chooses what is fastest at the moment, but full_determinism needs the same choice each time; "
        "keep one of them",
    )
    _check_one_schedule(efficiency, training)
    if efficiency.use_muon:
        _check_muon(training)


def _check_muon(training: TrainingArguments) -> None:
    optim = as_typed(training.optim)
    require(
        optim in ("adamw_torch", "adamw_torch_fused") and not training.optim_args,
        f"use_muon replaces optim: {optim}{' and its optim_args' if training.optim_args else ''}; leave "
        "optim and optim_args out",
    )
    require(
        not training.deepspeed and not training.fsdp,
        "use_muon needs whole matrices, but DeepSpeed and FSDP shard them; drop use_muon",
    )


def _check_one_schedule(efficiency: EfficiencySettings, training: TrainingArguments) -> None:
    if not efficiency.has_lr_steps:
        return
    name = "lr_step_size" if efficiency.lr_step_size is not None else "lr_milestones"
    kind = as_typed(training.lr_scheduler_type)
    require(
        kind in GIVES_WAY,
        f"{name} and lr_scheduler_type: {kind} are two schedules of the learning rate; add lr_scheduler_type: "
        f"constant, or leave {name} out",
    )
    require(not training.lr_scheduler_kwargs, f"lr_scheduler_kwargs have no effect with {name}; leave them out")
    deepspeed = getattr(training, "hf_deepspeed_config", None)
    require(
        deepspeed is None or deepspeed.get_value("scheduler") is None,
        f"{name} and the scheduler of the DeepSpeed configuration are two schedules; remove scheduler from the file",
    )
