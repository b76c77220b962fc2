"""Settings of the model: which one is trained, and how."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional

from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.settings.base import Allowed, changed_fields, check_fields, option, require

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")

INITIAL = ("true", "gaussian", "olora", "pissa", "loftq")
"""Values of ``init_lora_weights``."""

OF_ADAPTERS = (
    "peft_type use_rslora use_dora init_lora_weights loraplus_lr_ratio modules_to_save exclude_modules "
    "layers_to_transform adapter_name_or_path".split()
)
PATTERNS = ("trainable_parameters", "frozen_parameters")
MUTATING = ("olora", "pissa", "loftq", "corda", "lora_ga")
"""Initializations that subtract the initial adapter from the base weights, at each load again: it must be the same."""

ALLOWED = {
    "lora_r": Allowed(least=1),
    "lora_alpha": Allowed(above=0),
    "lora_dropout": Allowed(below=1),
    "loraplus_lr_ratio": Allowed(least=1),
    "teacher_weight": Allowed(above=0, most=1),
    "teacher_temperature": Allowed(above=0),
    "embedded_base_steps": Allowed(least=1),
}

OF_LORA = ("use_rslora", "use_dora", "init_lora_weights", "loraplus_lr_ratio", "exclude_modules")


@dataclass(frozen=True)
class ModelSettings:
    """Which model is trained, and which of its weights."""

    model_name_or_path: Optional[str] = option(
        None, "model folder with a config.json, or a Hub id; default: a small Granite hybrid, trained once and cached"
    )
    model_revision: Optional[str] = option(None, "branch, tag or commit on the Hub")
    trust_remote_code: bool = option(
        False, "run Python code that comes with the model; the log names its files and their hashes first"
    )
    allow_pickle: bool = option(
        False,
        "also read weights stored as pickle files (tensors only), and checkpoints of other runs whose files can "
        "contain code (DeepSpeed, sharded FSDP)",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "type of the frozen weights, or with tuning: full of the trained weights (bfloat16 takes half the memory and "
        "needs an optimizer that does not lose small steps, which is chosen unless you set optim)",
    )
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = option(
        "auto",
        "precision of training: bf16 or fp16 autocast, or no for the type of the weights. auto: follow bf16, fp16 "
        "or the launcher, else the fastest safe one for the device",
    )
    attn_implementation: Optional[str] = option(
        None, "sdpa, eager, flash_attention_2, ...; default: flash attention if it is installed and runs, else sdpa"
    )
    checkpoint_every_layer: bool = option(
        False, "keep only the inputs of each layer and recompute the rest in the backward pass: less memory, more time"
    )
    tuning: Literal["full", "lora", "qlora"] = option(
        "lora", "full: train all weights; lora: low-rank adapters; qlora: adapters over weights stored in 4 or 8 bits"
    )
    tuning_path: Literal["given", "auto"] = option(
        "given",
        "auto: before the run, choose how to store frozen weights (as they are, in half precision, in 8 or 4 bits, in "
        "main memory and on disk), and use the next way if a single row does not fit",
    )
    load_in_8bit: bool = option(False, "qlora: store frozen weights in 8 bits (LLM.int8) instead of 4 (NF4)")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "qlora: the data type of 4-bit weights")
    bnb_4bit_use_double_quant: bool = option(True, "qlora: quantize the scales of 4-bit weights too")
    device_map: Optional[str] = option(
        None,
        "auto, balanced, balanced_low_0 or sequential: spread the weights over the GPUs, main memory and disk of one "
        "process, as far as max_gpu_mem, cpu_mem and offload_folder allow",
    )
    lora_r: int = option(8, "rank of the adapters")
    lora_alpha: float = option(16.0, "the adapters are scaled by lora_alpha / lora_r")
    lora_dropout: float = option(0.0, "dropout in front of the adapters")
    lora_target_modules: Optional[list[str]] = option(
        None, "names of the modules to adapt; default: every linear layer that the model calls"
    )
    peft_type: Literal["lora", "vera"] = option(
        "lora",
        "what an adapter is: two matrices for each layer (LoRA), or two vectors between matrices that all layers share "
        "(VeRA)",
    )
    adapter_name_or_path: Optional[str] = option(
        None, "folder of an adapter of model_name_or_path to train further; its own configuration applies"
    )
    use_rslora: bool = option(
        False, "scale adapters by lora_alpha / sqrt(lora_r), with which high ranks learn as fast as low ones"
    )
    use_dora: bool = option(False, "train the lengths of the rows of weights separately from their directions (DoRA)")
    init_lora_weights: str = option(
        "true",
        f"initialization of the adapters: true (no change of the model), {', '.join(INITIAL[1:])}; the last three "
        "subtract the initial adapter from the base weights",
    )
    loraplus_lr_ratio: Optional[float] = option(
        None, "LoRA+: how many times faster B learns than A, such as 16; learning_rate is the rate of A"
    )
    modules_to_save: Optional[list[str]] = option(
        None, "names of modules to train fully in addition to the adapters, and to save with them, such as lm_head"
    )
    exclude_modules: Optional[list[str]] = option(None, "names of modules that get no adapter")
    layers_to_transform: Optional[list[int]] = option(None, "numbers of the layers that get adapters, counted from 0")
    new_tokens: Optional[list[str]] = option(
        None, "tokens to add to the tokenizer; their rows of the embedding are trained, with adapters too"
    )
    trainable_parameters: Optional[list[str]] = option(
        None, "tuning: full: regular expressions for the names of the weights to train; default: all"
    )
    frozen_parameters: Optional[list[str]] = option(
        None, "tuning: full: regular expressions for the names of weights to freeze, such as embed_tokens"
    )
    teacher: Optional[str] = option(
        None,
        "run, folder or Hub id of a trained model of the same task to learn from in addition to the data "
        "(distillation); it must have the same tokenizer or classes, and is neither trained nor saved",
    )
    teacher_weight: float = option(
        0.5, "weight of the distance to the teacher in the loss; the rest is the loss of the task"
    )
    teacher_temperature: float = option(
        2.0,
        "divisor of both models' logits before they are compared; with higher values, what the teacher finds unlikely "
        "has more weight",
    )
    embedded_base_steps: int = option(240, "optimizer steps for the single training of the embedded base model")

    def __post_init__(self) -> None:
        check_fields(self, ALLOWED)
        misplaced = next(
            (name for name in changed_fields(self) if name.startswith("teacher_") and self.teacher is None), None
        )
        require(misplaced is None, f"{misplaced} needs a teacher; add teacher: RUN, or drop it")
        self._check_adapters()
        device_map = self.device_map
        require(
            device_map is None or device_map in DEVICE_MAPS,
            f"device_map is {device_map!r}; allowed: {', '.join(DEVICE_MAPS)}"
            f"{did_you_mean(str(device_map), DEVICE_MAPS)}",
        )
        require(
            not (self.load_in_8bit and self.tuning != "qlora"),
            f"load_in_8bit is for weights that are not trained; it needs tuning: qlora, but tuning is {self.tuning}",
        )

    @property
    def trains_bfloat16(self) -> bool:
        """Whether trained weights are stored in bfloat16 without float32 master weights."""
        return self.dtype == "bfloat16" and self.tuning == "full"

    def _check_adapters(self) -> None:
        is_full, given = self.tuning == "full", changed_fields(self)
        is_vera = self.peft_type == "vera"
        for names, are_refused, why in (
            (OF_ADAPTERS, is_full, "adapters, but tuning is full, which has none; drop it, or set tuning: lora"),
            (OF_LORA, is_vera, "LoRA, but peft_type is vera, which does not have it; drop one of them"),
            (PATTERNS, not is_full, "tuning: full; for adapters, set lora_target_modules or exclude_modules"),
        ):
            misplaced = next((name for name in names if are_refused and name in given), None)
            require(misplaced is None, f"{misplaced} is for {why}")
        for name in PATTERNS:
            _check_patterns(name, getattr(self, name) or ())
        self._check_initial()
        tokens = self.new_tokens or []
        require(all(tokens), "new_tokens contains an empty token; remove it")
        require(len({*tokens}) == len(tokens), f"new_tokens lists a token twice: {', '.join(tokens)}; keep one of them")

    def _check_initial(self) -> None:
        initial = self.init_lora_weights
        require(
            not initial.startswith("pissa_niter"),
            f"init_lora_weights is {initial}, a random decomposition: each load would subtract a different part from "
            f"the base weights, and a saved adapter would not fit them; use pissa, which is exact",
        )
        require(
            initial in INITIAL,
            f"init_lora_weights is {initial!r}; allowed: {', '.join(INITIAL)}{did_you_mean(initial, INITIAL)}",
        )
        require(
            initial not in MUTATING or self.tuning != "qlora",
            f"init_lora_weights: {initial} changes the base weights, but tuning: qlora quantizes them before the "
            "adapters exist, so a saved adapter would not fit them; use tuning: lora, or init_lora_weights: true",
        )
        require(
            initial not in MUTATING or self.device_map is None,
            f"init_lora_weights: {initial} reads the base weights, which device_map may move; drop one of them",
        )


def _check_patterns(name: str, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        is_list = pattern.startswith(("['", '["')) and pattern.endswith("]")  # as a pattern it fits any of its letters
        require(
            not is_list, f"{name} has {pattern}, a list as one word; on a command line, type --{name} 'first' 'second'"
        )
        try:
            re.compile(pattern)
        except re.error as error:
            raise SettingsError(f"{name} has {pattern!r}, which is not a regular expression: {error}") from error
