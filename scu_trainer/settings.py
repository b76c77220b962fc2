"""Settings: one small dataclass per concern. Everything is checked when it is made, before any work is spent.

Stock training options are not repeated here: they stay in ``transformers.TrainingArguments``, and the command line
composes both. On the command line the fields of ``RegularizationSettings`` carry the prefix ``scu_``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Literal, Optional, Union, get_args, get_type_hints

from scu_trainer.errors import SettingsError, nearest

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
EMBEDDED_DATASETS = ("python_docs", "stdlib_docstrings", "stdlib_source")


def _option(default, help: str):
    return field(default=default, metadata={"help": help})


def _check_choices(settings) -> None:
    """Reject a value outside a ``Literal`` field's choices, naming the nearest one."""
    hints = get_type_hints(type(settings))
    for item in fields(settings):
        choices = get_args(hints[item.name])
        if getattr(hints[item.name], "__origin__", None) is not Literal:
            continue
        value = getattr(settings, item.name)
        if value not in choices:
            raise SettingsError(
                f"{item.name} is {value!r}; allowed: {', '.join(map(str, choices))}{nearest(str(value), choices)}"
            )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingsError(message)


@dataclass(frozen=True)
class RegularizationSettings:
    """The Shannon Control Unit: hold S = ParamBPT / (DataBPT + ParamBPT) at a target by moving lambda.

    Units: ParamBPT and DataBPT are bits per token, sigma has the unit of a weight, lambda is the shrink per unit of
    learning rate (decoupled actuator) or the factor of the penalty in nats per token (penalty actuator).
    """

    law: Literal["model", "original", "fixed", "schedule"] = _option(
        "model",
        "model: known plant gain, estimated growth; original: the published PI law with an acting penalty; "
        "fixed: constant lambda; schedule: lambda ramps from lambda_init to lambda_final",
    )
    target_s: Union[float, str] = _option(0.1, "target of S, between 0 and 1, or 'auto' (needs held-out data)")
    measure: Literal["effective", "factors"] = _option(
        "effective", "LoRA: squared norm of the effective update scale*B*A, or of the factors A and B themselves"
    )
    prior: Literal["init", "zero"] = _option("init", "weights toward which lambda shrinks: the start of training, or 0")
    sigma: float = _option(0.1, "standard deviation of the Gaussian prior around w0, in units of a weight")
    tokens: Optional[int] = _option(
        None, "N, the tokens that the description of the weights is spread over; default: supervised training tokens"
    )
    stop_at_target: bool = _option(False, "end training when S reaches target_s (early stop without held-out data)")
    hold_steps: int = _option(
        0, "with stop_at_target: instead of ending at once hold S for this many steps while the rate decays to 0"
    )
    control_frequency: int = _option(1, "optimizer steps between two decisions of the controller")
    ema_alpha: Optional[float] = _option(
        None, "weight of the newest value: in the average of DataBPT (model law, 0.05) or of S (original law, 0.1)"
    )
    time_constant: float = _option(10.0, "model law: steps in which an error of logit(S) is taken back")
    growth_alpha: float = _option(0.2, "model law: weight of the newest growth of logit(S) in its running average")
    max_shrink: float = _option(0.1, "largest fraction of (w - w0) removed by one optimizer step, decoupled actuator")
    kp: float = _option(0.8, "original law: proportional gain on S - target")
    ki: float = _option(0.15, "original law: integral gain on S - target")
    deadband: Optional[float] = _option(
        None, "errors of S smaller than this change nothing (original law 0.002, model law 0)"
    )
    integral_clamp: float = _option(0.2, "original law: bound on the absolute value of the integral term")
    integral_leak: float = _option(0.995, "original law: factor on the integral per control step")
    lambda_init: float = _option(1.0, "lambda at the start (original, fixed and schedule laws)")
    lambda_min: Optional[float] = _option(None, "lower bound of lambda (original law 1e-4, else 0)")
    lambda_max: Optional[float] = _option(None, "upper bound of lambda (original law 10, else none but max_shrink)")
    lambda_final: float = _option(0.0, "schedule law: lambda at the last step")
    schedule: Literal["linear", "cosine"] = _option("linear", "schedule law: shape of the ramp of lambda")
    actuator: Literal["auto", "decoupled", "penalty"] = _option(
        "auto",
        "decoupled: w += lr*lambda*(w0 - w) after the optimizer step; penalty: lambda*(w - w0)/(sigma^2 N) is added "
        "to the gradient before clipping; auto: penalty for the original law, decoupled for all others",
    )
    auto_patience: int = _option(2, "target_s auto: evaluations in a row above the best before S is held")

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_s", _target(self.target_s))
        _check_choices(self)
        for name in ("sigma", "time_constant", "max_shrink"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, f"scu_{name} is {value}; it must be above 0")
        for name in ("control_frequency", "auto_patience"):
            _require(getattr(self, name) >= 1, f"scu_{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("growth_alpha", "ema_alpha", "max_shrink"):
            value = getattr(self, name)
            _require(value is None or 0 < value <= 1, f"scu_{name} is {value}; it must be above 0 and at most 1")
        _require(0 <= self.integral_leak <= 1, f"scu_integral_leak is {self.integral_leak}; allowed: 0 to 1")
        _require(self.tokens is None or self.tokens > 0, f"scu_tokens is {self.tokens}; it must be 1 or more")
        _require(self.hold_steps >= 0, f"scu_hold_steps is {self.hold_steps}; it must be 0 or more")
        for name in (
            "kp",
            "ki",
            "integral_clamp",
            "lambda_init",
            "lambda_final",
            "lambda_min",
            "lambda_max",
            "deadband",
        ):
            value = getattr(self, name)
            _require(
                value is None or (math.isfinite(value) and value >= 0), f"scu_{name} is {value}; it must be 0 or more"
            )
        low, high = self.lambda_bounds
        _require(low <= high, f"scu_lambda_min {low} exceeds scu_lambda_max {high}; lower scu_lambda_min")
        if self.law == "original":
            _require(
                low <= self.lambda_init <= high,
                f"scu_lambda_init {self.lambda_init} is outside [{low}, {high}]; change it or scu_lambda_min/max",
            )
            _require(
                low > 0, "scu_lambda_min is 0; the original law multiplies lambda and cannot leave 0, use 1e-4 or more"
            )
        _require(
            not (self.stop_at_target and self.target_s == "auto"),
            "scu_stop_at_target needs a number as scu_target_s; 'auto' already finds its own turning point",
        )
        _require(
            not (self.hold_steps and not self.stop_at_target),
            "scu_hold_steps has an effect only with scu_stop_at_target; set scu_stop_at_target: true or drop it",
        )
        _require(
            not (self.stop_at_target and self.law in ("fixed", "schedule") and self.hold_steps),
            f"scu_hold_steps needs a law that can hold S (model or original); scu_law is {self.law}",
        )
        _require(
            not (self.target_s == "auto" and self.law != "model"),
            f"scu_target_s: auto works with scu_law: model; scu_law is {self.law}, give a number",
        )
        _require(
            not (self.law == "model" and self.actuator == "penalty"),
            "scu_law: model knows the gain of the decoupled actuator only; use scu_actuator: auto or scu_law: original",
        )

    @property
    def resolved_actuator(self) -> str:
        if self.actuator != "auto":
            return self.actuator
        return "penalty" if self.law == "original" else "decoupled"

    @property
    def lambda_bounds(self) -> tuple[float, float]:
        """Smallest and largest lambda, with the defaults of the law filled in."""
        low, high = (1e-4, 10.0) if self.law == "original" else (0.0, math.inf)
        return (
            low if self.lambda_min is None else self.lambda_min,
            high if self.lambda_max is None else self.lambda_max,
        )

    @property
    def resolved_ema_alpha(self) -> float:
        if self.ema_alpha is not None:
            return self.ema_alpha
        return 0.1 if self.law == "original" else 0.05

    @property
    def resolved_deadband(self) -> float:
        if self.deadband is not None:
            return self.deadband
        return 0.002 if self.law == "original" else 0.0


def _target(value) -> Union[float, str]:
    if value == "auto":
        return "auto"
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise SettingsError(f"scu_target_s is {value!r}; allowed: a number between 0 and 1, or auto") from None
    _require(0 < number < 1, f"scu_target_s is {number}; it must lie between 0 and 1, for instance 0.1")
    return number


@dataclass(frozen=True)
class MemorySettings:
    """How the rows of an optimizer step are cut into chunks, and how live memory moves the size of a chunk.

    A chunk is what one forward and backward sees. The logical batch, what the optimizer sees, stays what
    ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` say (but for ``batch_mode: logical``).
    """

    memory_control: bool = _option(
        True, "size chunks from live memory and recover from out-of-memory; false with no token_cap: the stock Trainer"
    )
    token_cap: Optional[Union[int, str]] = _option(
        None,
        "padded tokens per chunk (rows, for inputs without a length); auto: the longest row, or what keeps the device "
        "busy; default: auto with memory_control, no splitting without",
    )
    min_batch_size: int = _option(1, "rows per chunk: never fewer, whatever memory says")
    max_batch_size: Optional[int] = _option(None, "rows per chunk: never more; default: bounded by token_cap alone")
    target_headroom_gb: Union[float, str] = _option(
        "8%", "memory that stays free, in GiB, or as a share of the limit ('8%%')"
    )
    gc_threshold_gb: Optional[float] = _option(
        None,
        "below this many GiB free at the peak of a step, memory is collected at once; default: a quarter of "
        "target_headroom_gb",
    )
    pid_kp: float = _option(1.0, "proportional gain: ln(chunk size) per unit of used fraction below the target")
    pid_ki: float = _option(0.1, "integral gain, per optimizer step")
    pid_kd: float = _option(0.2, "derivative gain, optimizer steps")
    batch_mode: Literal["chunk", "logical"] = _option(
        "chunk",
        "chunk: memory moves the chunk, the logical batch stays; logical: memory moves the logical batch itself, "
        "between min_batch_size and max_batch_size rows per device, which changes the optimization",
    )
    batch_size_lr_rule: Literal["sqrt", "linear", "none"] = _option(
        "sqrt",
        "batch_mode logical: learning rate times (rows / nominal rows) to the power 1/2 (adaptive optimizers), "
        "1 (SGD) or 0",
    )
    chunked_loss: Literal["auto", "always", "never"] = _option(
        "auto",
        "causal language models: cross-entropy straight from the hidden states, some tokens at a time, so that logits "
        "never exist as a whole; same loss and gradient up to rounding. auto: from a vocabulary of 16,384 on",
    )
    memory_limit_gb: Optional[float] = _option(
        None, "GiB of the training device that each process may use at most; default: all that is there"
    )
    max_gpu_mem: Optional[Union[float, str]] = _option(
        None, "device_map: weights on each GPU, in GiB or as '4GB'; default: what accelerate finds free"
    )
    cpu_mem: Optional[Union[float, str]] = _option(
        None, "device_map: weights in main memory, in GiB or as '16GB'; the rest goes to offload_folder"
    )
    offload_folder: Optional[str] = _option(
        None, "device_map: folder for weights that fit neither on a GPU nor in main memory"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_cap", _token_cap(self.token_cap))
        object.__setattr__(self, "target_headroom_gb", _headroom(self.target_headroom_gb))
        for name in ("max_gpu_mem", "cpu_mem"):
            object.__setattr__(self, name, size_in_gib(name, getattr(self, name)))
        limit = self.memory_limit_gb
        _require(
            limit is None or (math.isfinite(limit) and limit > 0),
            f"memory_limit_gb is {limit}; it must be above 0, for instance 3.5",
        )
        _require(
            limit is None or self.memory_control,
            "memory_limit_gb is what memory control keeps to; set memory_control: true, or drop it",
        )
        _check_choices(self)
        _require(self.min_batch_size >= 1, f"min_batch_size is {self.min_batch_size}; it must be 1 or more")
        highest = self.max_batch_size
        _require(highest is None or highest >= 1, f"max_batch_size is {highest}; it must be 1 or more")
        _require(
            highest is None or self.min_batch_size <= highest,
            f"min_batch_size {self.min_batch_size} exceeds max_batch_size {highest}; lower min_batch_size",
        )
        for name in ("pid_kp", "pid_ki", "pid_kd", "gc_threshold_gb"):
            value = getattr(self, name)
            _require(value is None or (math.isfinite(value) and value >= 0), f"{name} is {value}; it must be 0 or more")
        _require(
            self.batch_mode == "chunk" or self.memory_control,
            "batch_mode: logical lets memory choose the batch; it needs memory_control: true",
        )

    @property
    def resolved_token_cap(self) -> Optional[Union[int, str]]:
        """A number, "auto", or None for no splitting by length."""
        return "auto" if self.token_cap is None and self.memory_control else self.token_cap

    @property
    def acts(self) -> bool:
        return self.memory_control or self.token_cap is not None

    @property
    def resolved_chunked_loss(self) -> str:
        """With memory control and splitting off the stock loss stays, unless asked otherwise."""
        return "never" if self.chunked_loss == "auto" and not self.acts else self.chunked_loss

    @property
    def headroom_share(self) -> Optional[float]:
        """Share of the limit that stays free; None where it is given in GiB."""
        return float(self.target_headroom_gb[:-1]) / 100 if isinstance(self.target_headroom_gb, str) else None


def _token_cap(value) -> Optional[Union[int, str]]:
    if value is None or value == "auto":
        return value
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise SettingsError(f"token_cap is {value!r}; allowed: a number of tokens, or auto") from None
    _require(number >= 1, f"token_cap is {number}; it must be 1 token or more, or auto")
    return number


def _headroom(value) -> Union[float, str]:
    """A float in GiB, or a share such as '8%'."""
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise SettingsError(f"target_headroom_gb is {value!r}; allowed: GiB such as 1.5, or a share '8%'") from None
    if text.endswith("%"):
        _require(0 <= number < 100, f"target_headroom_gb is {text}; a share lies between 0% and below 100%")
        return text
    _require(math.isfinite(number) and number >= 0, f"target_headroom_gb is {number}; it must be 0 or more")
    return number


BYTES = {"": 2**30, "GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}
"""Units as accelerate's ``max_memory`` knows them; a bare number counts GiB."""


def size_in_gib(name: str, value) -> Optional[float]:
    """GiB of a number of GiB, or of a text such as '4GB' or '900MiB'."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _require(math.isfinite(value) and value > 0, f"{name} is {value}; it must be above 0 GiB")
        return float(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(value).strip().upper())
    _require(match is not None, f"{name} is {value!r}; allowed: GiB such as 3.5, or a size such as 4GB or 900MiB")
    return float(match[1]) * BYTES[match[2] or ""] / 2**30


METHODS = ("token_budget", "noise_guard", "acmds", "infobatch", "length_warmup")
"""Curricula that can be joined with "+"; "none" stands alone."""


@dataclass(frozen=True)
class CurriculumSettings:
    """Which samples a step sees. Whatever is chosen, each sample's loss is tracked and the books are kept."""

    curriculum: str = _option(
        "none",
        "none: uniform; token_budget: batches of equal tokens and similar lengths; noise_guard: leaves out rows whose "
        "loss says that they are wrong, and lists them; acmds: difficulty follows memory and epoch; infobatch: "
        "unbiased pruning of easy rows; length_warmup: rows are cut short at first. Several: joined with '+'",
    )
    token_budget: Optional[int] = _option(
        None, "padded tokens per batch and device; default: as many batches as per_device_train_batch_size makes"
    )
    difficulty_alpha: float = _option(0.3, "weight of the newest loss in a sample's running average")
    difficulty_window: int = _option(
        3, "epochs after which a score counts as stale; acmds shows every sample at least once in it"
    )
    noise_guard_max_fraction: float = _option(0.5, "noise_guard: never leaves out more than this share of the rows")
    noise_guard_readmit_fraction: float = _option(
        0.1, "noise_guard: share of the rows left out that is trained on again each epoch, so that scores are renewed"
    )
    infobatch_prune_ratio: float = _option(0.5, "infobatch: probability that a row below the mean loss is left out")
    infobatch_final_fraction: float = _option(0.125, "infobatch: share of the epochs, the last ones, that see all rows")
    acmds_fraction: float = _option(0.75, "acmds: share of the rows that an epoch sees")
    length_warmup_steps: float = _option(0.3, "length_warmup: steps, or below 1 their share of the run")
    length_warmup_start: int = _option(64, "length_warmup: tokens per row in the first step")

    def __post_init__(self) -> None:
        object.__setattr__(self, "curriculum", _curriculum(self.curriculum))
        _require(
            self.token_budget is None or self.token_budget >= 1,
            f"token_budget is {self.token_budget}; it must be 1 token or more",
        )
        _require(
            self.token_budget is None or "token_budget" in self.methods,
            f"token_budget has an effect only with curriculum: token_budget; curriculum is {self.curriculum}",
        )
        _require(
            0 < self.difficulty_alpha <= 1,
            f"difficulty_alpha is {self.difficulty_alpha}; it must be above 0 and at most 1",
        )
        _require(self.difficulty_window >= 1, f"difficulty_window is {self.difficulty_window}; it must be 1 or more")
        for name in ("noise_guard_max_fraction", "noise_guard_readmit_fraction", "infobatch_final_fraction"):
            _require(0 <= getattr(self, name) <= 1, f"{name} is {getattr(self, name)}; allowed: 0 to 1")
        _require(
            0 <= self.infobatch_prune_ratio < 1,
            f"infobatch_prune_ratio is {self.infobatch_prune_ratio}; allowed: 0 to below 1",
        )
        _require(
            0 < self.acmds_fraction <= 1, f"acmds_fraction is {self.acmds_fraction}; it must be above 0 and at most 1"
        )
        _require(
            math.isfinite(self.length_warmup_steps) and self.length_warmup_steps >= 0,
            f"length_warmup_steps is {self.length_warmup_steps}; it must be 0 or more",
        )
        _require(
            self.length_warmup_start >= 1, f"length_warmup_start is {self.length_warmup_start}; it must be 1 or more"
        )

    @property
    def methods(self) -> tuple[str, ...]:
        """What is joined, () for none."""
        return () if self.curriculum == "none" else tuple(self.curriculum.split("+"))


def _curriculum(value) -> str:
    """Methods joined with "+", checked for those that do not go together."""
    from scu_trainer.control.curriculum import check_methods  # numpy: only for those who ask for a curriculum

    names = [str(name).strip() for name in (value.split("+") if isinstance(value, str) else value)]
    for name in names:
        _require(
            name in METHODS or name == "none",
            f"curriculum is {name!r}; allowed: none, {', '.join(METHODS)}, joined with '+'"
            f"{nearest(name, (*METHODS, 'none'))}",
        )
    reason = check_methods(names) if names != ["none"] else None
    _require(reason is None, f"curriculum {'+'.join(names)}: {reason}")
    return "+".join(names)


@dataclass(frozen=True)
class ModelSettings:
    """Which model is tuned, and which of its weights."""

    model_name_or_path: Optional[str] = _option(
        None, "folder with a config.json, or a Hub id; default: a small Granite hybrid, made once and cached"
    )
    model_revision: Optional[str] = _option(None, "branch, tag or commit on the Hub")
    trust_remote_code: bool = _option(False, "run Python code that comes with the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option("auto", "type of the frozen weights")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = _option(
        "auto",
        "arithmetic of training: bf16 or fp16 autocast, or no: that of the weights. auto: what bf16, fp16 or the "
        "launcher say, else the fastest safe one of the device",
    )
    attn_implementation: Optional[str] = _option(
        None, "sdpa, eager, flash_attention_2, ...; default: flash attention where it is installed and runs, else sdpa"
    )
    checkpoint_every_layer: bool = _option(
        False, "keep only the inputs of each layer and compute its inside again in backward: less memory, more time"
    )
    tuning: Literal["full", "lora", "qlora"] = _option(
        "lora", "train all weights; low-rank adapters; or adapters over weights that are stored in 4 or 8 bits"
    )
    load_in_8bit: bool = _option(False, "qlora: store frozen weights in 8 bits (LLM.int8) instead of 4 (NF4)")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = _option("nf4", "qlora: the 16 values that 4 bits stand for")
    bnb_4bit_use_double_quant: bool = _option(True, "qlora: quantize the scales of 4-bit weights too")
    device_map: Optional[str] = _option(
        None,
        "auto, balanced, balanced_low_0 or sequential: spread the weights over the GPUs, main memory and disk of one "
        "process, as far as max_gpu_mem, cpu_mem and offload_folder allow",
    )
    lora_r: int = _option(8, "rank of the adapters")
    lora_alpha: float = _option(16.0, "scale of the adapters is lora_alpha / lora_r")
    lora_dropout: float = _option(0.0, "dropout in front of the adapters")
    lora_target_modules: Optional[list[str]] = _option(
        None, "names of the modules to adapt; default: every linear layer that the architecture really calls"
    )
    embedded_base_steps: int = _option(240, "optimizer steps that make the embedded base model, once")

    def __post_init__(self) -> None:
        _check_choices(self)
        _require(self.lora_r >= 1, f"lora_r is {self.lora_r}; it must be 1 or more")
        _require(self.lora_alpha > 0, f"lora_alpha is {self.lora_alpha}; it must be above 0")
        _require(0 <= self.lora_dropout < 1, f"lora_dropout is {self.lora_dropout}; allowed: 0 to below 1")
        _require(self.embedded_base_steps >= 1, f"embedded_base_steps is {self.embedded_base_steps}; 1 or more")
        maps = DEVICE_MAPS
        _require(
            self.device_map is None or self.device_map in maps,
            f"device_map is {self.device_map!r}; allowed: {', '.join(maps)}{nearest(str(self.device_map), maps)}",
        )
        _require(
            not (self.load_in_8bit and self.tuning != "qlora"),
            f"load_in_8bit stores weights that are not trained; it needs tuning: qlora, and tuning is {self.tuning}",
        )


@dataclass(frozen=True)
class DataSettings:
    """Where documents come from and how they become rows of tokens."""

    dataset: str = _option(
        "stdlib_docstrings",
        "embedded name (python_docs, stdlib_docstrings, stdlib_source), a .txt/.jsonl/.csv/.parquet file, a folder of "
        "such files or of `datasets.save_to_disk`, or a Hub id",
    )
    dataset_config_name: Optional[str] = _option(None, "configuration of a Hub dataset")
    dataset_split: str = _option("train", "split to train on")
    eval_dataset: Optional[str] = _option(None, "held-out data of its own, same kinds as dataset; default: a split")
    validation_split_percentage: float = _option(5.0, "share of the documents held out when eval_dataset is not given")
    max_eval_documents: Optional[int] = _option(None, "cap on held-out documents")
    streaming: bool = _option(False, "read a Hub dataset or large files as they come; needs max_steps")
    text_column: str = _option("text", "column with plain text")
    dataset_size: Optional[int] = _option(None, "cap on documents, taken before the split")
    block_size: int = _option(512, "tokens per training row")
    packing: bool = _option(True, "fill rows with several documents, one after the other")
    isolate_documents: bool = _option(False, "packed documents do not attend to each other")
    completion_only_loss: bool = _option(True, "prompt/completion rows: learn the completion's tokens only")
    assistant_only_loss: bool = _option(True, "chat rows: learn the assistant's tokens only")
    chat_template: Optional[str] = _option(None, "file with a Jinja chat template; default: the tokenizer's own")
    skip_bad_rows: bool = _option(False, "count and skip unreadable rows instead of stopping at the first")
    preprocessing_num_workers: int = _option(1, "processes that tokenize")
    cache_dir: Optional[str] = _option(None, "where tokenized data and the embedded base are kept")

    def __post_init__(self) -> None:
        _check_choices(self)
        _require(bool(self.dataset), "dataset is empty; give an embedded name, a path or a Hub id")
        _require(self.block_size >= 8, f"block_size is {self.block_size}; it must be 8 tokens or more")
        for name in ("dataset_size", "max_eval_documents"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} is {value}; it must be 1 or more")
        _require(self.preprocessing_num_workers >= 1, "preprocessing_num_workers must be 1 or more")
        percentage = self.validation_split_percentage
        _require(0 <= percentage < 100, f"validation_split_percentage is {percentage}; allowed: 0 to below 100")
        _require(
            not (self.isolate_documents and not self.packing),
            "isolate_documents has an effect only with packing; set packing: true or drop it",
        )
