"""Settings of the regularization loop (control of lambda) and of the retention loop (limits on forgetting)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

from scu_trainer.errors import SettingsError
from scu_trainer.settings.base import Allowed, changed_fields, check_fields, option, require

LAWS_WITHOUT_TARGET = ("fixed", "schedule")
"""Laws that need no target, because lambda follows directly from the settings."""

FEWEST_RETAIN_DOCUMENTS = 16
"""Smallest number of documents: eight to measure on, and eight for the verdict."""

MEASURES = ("law", "target_s", "measure", "prior", "sigma", "tokens", "ema_alpha")
"""Fields that define how S is measured; all others define how it is controlled."""

DEFAULTS_OF_LAWS: dict[str, tuple[Any, Any]] = {
    "actuator": ("penalty", "decoupled"),
    "lambda_min": (1e-4, 0.0),
    "lambda_max": (10.0, math.inf),
    "ema_alpha": (0.1, 0.05),
    "deadband": (0.002, 0.0),
}
"""Field -> its default for the original law, and for all others."""

ALLOWED = {
    "sigma": Allowed(above=0),
    "tokens": Allowed(least=1),
    "control_frequency": Allowed(least=1),
    "ema_alpha": Allowed(above=0, most=1),
    "time_constant": Allowed(above=0),
    "growth_alpha": Allowed(above=0, most=1),
    "max_shrink": Allowed(above=0, most=1),
    "integral_leak": Allowed(most=1),
    "auto_patience": Allowed(least=1),
}


@dataclass(frozen=True)
class RegularizationSettings:
    """The Shannon Control Unit: measure S = ParamBPT / (DataBPT + ParamBPT), and with a target keep it there by lambda.

    Without ``target_s`` nothing is controlled: S is measured at logging steps, and the weights are the same as without
    the loop. The laws ``fixed`` and ``schedule`` use ``lambda_init`` and need no target.

    Units: ParamBPT and DataBPT are bits per token, sigma has the unit of a weight, lambda is the shrink per unit of
    learning rate (decoupled actuator) or the factor of the penalty in nats per token (penalty actuator).
    """

    law: Literal["model", "original", "fixed", "schedule"] = option(
        "model",
        "model: known plant gain, estimated growth; original: the published PI law with a penalty; fixed: constant "
        "lambda; schedule: lambda changes from lambda_init to lambda_final",
    )
    target_s: Union[float, str, None] = option(
        None,
        "target of S, between 0 and 1, or 'auto' (needs held-out data); none (the default): only measure S",
    )
    measure: Literal["effective", "factors"] = option(
        "effective", "LoRA: squared norm of the effective update scale*B*A, or of the factors A and B themselves"
    )
    prior: Literal["init", "zero"] = option(
        "init", "weights toward which lambda decays: those at the start of training, or 0"
    )
    sigma: float = option(0.1, "standard deviation of the Gaussian prior around w0, in units of a weight")
    tokens: Optional[int] = option(
        None,
        "N, the number of tokens over which the description length of the weights is spread; default: the number of "
        "supervised training tokens",
    )
    stop_at_target: bool = option(False, "end training when S reaches target_s (early stop without held-out data)")
    hold_steps: int = option(
        0,
        "with stop_at_target: hold S for this many steps while the learning rate decays to 0, instead of ending "
        "immediately",
    )
    control_frequency: int = option(
        1,
        "optimizer steps between two decisions of the controller; without a target, S is measured when it is logged",
    )
    ema_alpha: Optional[float] = option(
        None,
        "weight of the newest value in the running average of DataBPT (model law, default 0.05) or of S (original law, "
        "default 0.1)",
    )
    time_constant: float = option(10.0, "model law: steps within which an error of logit(S) is corrected")
    growth_alpha: float = option(0.2, "model law: weight of the newest growth of logit(S) in its running average")
    max_shrink: float = option(0.1, "largest fraction of (w - w0) removed by one optimizer step, decoupled actuator")
    kp: float = option(0.8, "original law: proportional gain on S - target")
    ki: float = option(0.15, "original law: integral gain on S - target")
    deadband: Optional[float] = option(
        None, "errors of S smaller than this count as 0; default: 0.002 with the original law, 0 with the model law"
    )
    integral_clamp: float = option(0.2, "original law: bound on the absolute value of the integral term")
    integral_leak: float = option(0.995, "original law: factor on the integral per control step")
    lambda_init: float = option(1.0, "lambda at the start (original, fixed and schedule laws)")
    lambda_min: Optional[float] = option(None, "lower bound of lambda; default: 1e-4 with the original law, else 0")
    lambda_max: Optional[float] = option(
        None, "upper bound of lambda; default: 10 with the original law, else only max_shrink limits it"
    )
    lambda_final: float = option(0.0, "schedule law: lambda at the last step")
    schedule: Literal["linear", "cosine"] = option("linear", "schedule law: shape of the ramp of lambda")
    actuator: Literal["auto", "decoupled", "penalty"] = option(
        "auto",
        "decoupled: w += lr*lambda*(w0 - w) after the optimizer step; penalty: lambda*(w - w0)/(sigma^2 N) is added "
        "to the gradient before clipping; auto: penalty for the original law, decoupled for all others",
    )
    auto_patience: int = option(2, "target_s auto: number of evaluations in a row above the best before S is held")

    @property
    def steers(self) -> bool:
        """Whether lambda may change the weights. Without a target, only the laws in LAWS_WITHOUT_TARGET do that."""
        return self.target_s is not None or self.law in LAWS_WITHOUT_TARGET

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_s", _parsed_target(self.target_s))
        check_fields(self, ALLOWED, prefix="scu_")
        low, high = self.lambda_bounds
        require(low <= high, f"scu_lambda_min {low} exceeds scu_lambda_max {high}; lower scu_lambda_min")
        if self.law == "original":
            require(
                low <= self.lambda_init <= high,
                f"scu_lambda_init {self.lambda_init} is outside [{low}, {high}]; change it or scu_lambda_min/max",
            )
            require(
                low > 0, "scu_lambda_min is 0; the original law multiplies lambda and cannot leave 0, use 1e-4 or more"
            )
        require(
            not (self.stop_at_target and self.target_s == "auto"),
            "scu_stop_at_target needs a number as scu_target_s, because 'auto' already finds the turning point",
        )
        require(
            not (self.hold_steps and not self.stop_at_target),
            "scu_hold_steps has an effect only with scu_stop_at_target; set scu_stop_at_target: true or drop it",
        )
        require(
            not (self.stop_at_target and self.law in LAWS_WITHOUT_TARGET and self.hold_steps),
            f"scu_hold_steps needs a law that can hold S (model or original); scu_law is {self.law}",
        )
        require(
            not (self.target_s == "auto" and self.law != "model"),
            f"scu_target_s: auto works only with scu_law: model, but scu_law is {self.law}; give a number",
        )
        require(
            not (self.law == "model" and self.actuator == "penalty"),
            "scu_law: model knows the gain of the decoupled actuator only; use scu_actuator: auto or scu_law: original",
        )
        self._require_target()

    def _require_target(self) -> None:
        """Raise SettingsError for a field that only has an effect with a target, if there is none."""
        names = [name for name in changed_fields(self) if name not in MEASURES and not self.steers]
        names += ["stop_at_target"] if self.stop_at_target and self.target_s is None and self.steers else []
        require(
            not names,
            f"scu_{names[0] if names else ''} has an effect only with a target; without scu_target_s, S is only "
            f"measured; add scu_target_s: 0.1 (or auto), or drop scu_{names[0] if names else ''}",
        )

    @property
    def resolved_actuator(self) -> str:
        return self._or_default("actuator")

    @property
    def lambda_bounds(self) -> tuple[float, float]:
        """Smallest and largest lambda, with the defaults of the law filled in."""
        return self._or_default("lambda_min"), self._or_default("lambda_max")

    @property
    def resolved_ema_alpha(self) -> float:
        return self._or_default("ema_alpha")

    @property
    def resolved_deadband(self) -> float:
        return self._or_default("deadband")

    def _or_default(self, name: str) -> Any:
        value, (of_original, of_others) = getattr(self, name), DEFAULTS_OF_LAWS[name]
        if value not in (None, "auto"):
            return value
        return of_original if self.law == "original" else of_others


SAMPLED = "sampled"
"""Value of ``retain`` for text that the model generates before training."""

OF_RETENTION = {
    "retain_budget_bits": Allowed(above=0),
    "retain_max_share": Allowed(above=0, most=0.9),
    "retain_frequency": Allowed(least=1),
}


@dataclass(frozen=True)
class RetentionSettings:
    """Which text must not be forgotten during training, the budget for that, and how forgetting is limited."""

    retain: Optional[str] = option(
        None,
        "text that must not be forgotten: an embedded name, a file, a folder or a Hub id, as for dataset; the "
        "name of a source of a mixture, of which the held-out documents are used; or sampled: text that the model "
        "generates before training. Its documents are split into one part to measure on, one to train on, and one for "
        "the verdict",
    )
    retain_budget_bits: float = option(
        0.02,
        "largest increase of the loss on this text, in bits per token, over the model before training; if it is given "
        "without retain, retain is sampled",
    )
    retain_actuator: Literal["auto", "replay", "lambda"] = option(
        "auto",
        "how to limit forgetting: add rows of the text to the batches (replay), or use the decay toward the initial "
        "weights (lambda); auto: replay if there is enough text to train on",
    )
    retain_max_share: float = option(0.5, "largest share of replayed rows in a batch")
    retain_documents: int = option(
        2000, "largest number of documents of retain to read; with sampled, at most 400 are generated"
    )
    retain_frequency: Optional[int] = option(
        None, "optimizer steps between two measurements; default: so that measuring takes about 2 %% of the time"
    )
    retain_stop: bool = option(False, "end the run if the budget cannot be kept, instead of only reporting it")

    def __post_init__(self) -> None:
        check_fields(self, OF_RETENTION)
        require(
            self.retain_documents >= FEWEST_RETAIN_DOCUMENTS,
            f"retain_documents is {self.retain_documents}; it must be {FEWEST_RETAIN_DOCUMENTS} or more: some are for "
            "measurements, others for the verdict",
        )
        given = changed_fields(self)
        require(
            self.retain is not None or not given,
            f"{given[0] if given else ''} has an effect only with retain, the text that must not be forgotten; "
            "give it, for instance --retain general.jsonl",
        )
        require(self.retain != "", "retain is empty; give a file or a dataset, or drop it")

    @property
    def acts(self) -> bool:
        return self.retain is not None


def _parsed_target(value) -> Union[float, str, None]:
    if value == "auto":
        return "auto"
    if value is None or value == "none":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise SettingsError(f"scu_target_s is {value!r}; allowed: a number between 0 and 1, auto, or none") from None
    require(0 < number < 1, f"scu_target_s is {number}; it must lie between 0 and 1, for instance 0.1")
    return number
