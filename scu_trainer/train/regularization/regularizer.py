"""Connect the control law to the model: measure S after an optimizer step, ask ``control/regularization.py`` what to
do, and act with lambda."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Optional

import torch
from torch import nn

from scu_trainer.control import regularization as control
from scu_trainer.control.tracking import BAND, SMALLEST_GAIN, forecast_s
from scu_trainer.errors import CheckpointError, ControlError
from scu_trainer.figures import NATS_PER_BIT
from scu_trainer.settings import RegularizationSettings
from scu_trainer.train.regularization.penalty import Prior, param_bpt, penalty_coefficient
from scu_trainer.train.regularization.zero import ZeroPrior, check_zero_stage
from scu_trainer.train.step.recovery.second_try import second_try

PROBE_DECISION = 2
"""Decision at which the loop first checks that it can act; by then the weights have left w0."""

OUTLOOK_STEPS = 16
"""Step of the first prediction of where S will end; the next ones follow each time the number of steps has doubled."""

STUCK_DECISIONS = 20
"""Decisions in a row with lambda at its upper bound and S above target after which the loop reports lost control."""


@dataclass
class RegularizerProgress:
    """What the regularizer keeps between steps besides the law's own state; JSON-safe, saved in checkpoints."""

    tokens_n: Optional[float] = None
    tokens_seen: float = 0.0
    gain: float = control.DECOUPLED_GAIN
    milestone: Optional[list[float]] = None
    outlook_done: bool = False
    stuck_decisions: int = 0
    notices: list[str] = field(default_factory=list)


class Regularizer:
    """Holds w0, the law's state and the running measurement of one training run.

    ``tokens``: N of ParamBPT; None to estimate it as tokens of the first optimizer step x steps of one epoch.
    ``prior_class``: how to access the trained weights, see ``prior_class_for``.
    """

    def __init__(
        self,
        settings: RegularizationSettings,
        model: nn.Module,
        tokens: Optional[float] = None,
        prior_class: type[Prior] = Prior,
    ) -> None:
        self.settings, self.steers = settings, settings.steers
        self._prior_class, self._tokens = prior_class, settings.tokens or tokens
        self.set_starting_weights(model)
        self.config: Optional[control.ControllerConfig] = None
        self.reset()

    def set_starting_weights(self, model: nn.Module) -> None:
        """Use the current trained weights of ``model`` as w0; with ``model_init``, every training has a new model."""
        self.prior = self._prior_class(model, self.settings.prior, self.settings.measure)

    # -- life of a run -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget what an earlier training has measured, but keep w0."""
        self.progress = RegularizerProgress(tokens_n=self._tokens)
        self.state = control.ControllerState()
        self._loaded: Optional[dict[str, Any]] = None
        self._losses: list[torch.Tensor] = []
        self._interval: list[tuple[torch.Tensor, Any]] = []

    def start(self, max_steps: int, steps_per_epoch: float, seed: int, logging_steps: int = 1) -> None:
        """Resolve the law for a run of ``max_steps`` optimizer steps, and use state loaded from a checkpoint.

        ``logging_steps``: optimizer steps between two measurements if nothing is steered.
        """
        self.config = resolve(self.settings, max_steps)
        self.state = control.initial_state(self.config)
        self._steps_per_epoch, self._seed = steps_per_epoch, seed
        self._decision_interval = self.settings.control_frequency if self.steers else max(1, logging_steps)
        if self._loaded is not None:
            self.state = control.ControllerState(**self._loaded["state"])
            self.progress = RegularizerProgress(**self._loaded["progress"])
            self._interval = [
                (torch.tensor(math.nan if loss is None else loss, dtype=torch.float64), items)  # JSON has no NaN
                for loss, items in self._loaded["interval"]
            ]
            self._apply_changed_goals(self._loaded["settings"])
            self._loaded = None

    def _apply_changed_goals(self, saved: dict[str, Any]) -> None:
        """Apply a target or fixed lambda that was changed for a resume; the checkpoint's state has the old ones."""
        if saved.get("target_s") != self.settings.target_s:
            self.state = replace(self.state, target_s=self.config.target_s, reached_step=None)
            self.progress.outlook_done, self.progress.milestone = False, None
        if (saved.get("target_s") is None) != (self.settings.target_s is None):
            at_start = control.initial_state(self.config)  # otherwise the old lambda would act on, or never leave 0
            self.state = replace(self.state, lam=at_start.lam, integral=0.0, saturated="")
        if self.config.name == "fixed":
            self.state = replace(self.state, lam=self.config.lambda_init)

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "state": asdict(self.state),
            "progress": asdict(self.progress),
            # Steps since the last decision: with control_frequency above 1 a checkpoint may be between two decisions.
            "interval": [[float(loss), float(items)] for loss, items in self._interval],
            "prior_fingerprint": self.prior.fingerprint(),
        }

    def load_state_dict(self, saved: dict[str, Any], prior: Optional[dict[str, torch.Tensor]]) -> None:
        """Continue from a checkpoint. ``prior``: its saved w0; None if w0 is the model as loaded. Raises
        CheckpointError if this run would decay toward another point or measure in another way."""
        self._check_same_measure(saved["settings"])
        if prior is not None:
            self.prior.load_state_dict(prior)
        found = self.prior.fingerprint()
        if not math.isclose(found, saved["prior_fingerprint"], rel_tol=1e-9, abs_tol=1e-12):
            raise CheckpointError(
                "the weights at the start of this run are not those that the checkpoint's run started from "
                f"(sum of squares {found:.9g}, was {saved['prior_fingerprint']:.9g}); lambda would decay toward a "
                "different point. Resume with the same model_name_or_path and seed"
            )
        self._loaded = saved

    def _check_same_measure(self, saved: dict[str, Any]) -> None:
        for name in ("law", "measure", "prior", "sigma", "tokens"):
            if saved.get(name) != getattr(self.settings, name):
                raise CheckpointError(
                    f"scu_{name} is {getattr(self.settings, name)!r}, the checkpoint was written with "
                    f"{saved.get(name)!r}; S before and after would not be comparable. Set it back, or start a new "
                    "output_dir"
                )

    # -- one optimizer step --------------------------------------------------------------------------------------------

    def observe_loss(self, loss: torch.Tensor) -> None:
        """``loss``: one accumulation batch's share of the window's mean loss in nats, detached, on the device."""
        self._losses.append(loss)

    def add_penalty(self, loss_scale: float = 1.0) -> None:
        """Add the gradient of lambda's penalty, before clipping. ``loss_scale``: the factor that a GradScaler applied
        to gradients."""
        if self.config.actuator == "penalty" and self.state.lam > 0 and self.progress.tokens_n:
            coefficient = penalty_coefficient(self.state.lam, self.settings.sigma, self.progress.tokens_n)
            self.prior.add_penalty_gradient(coefficient * loss_scale)
            self._check_penalty_acts(loss_scale)

    def discard_step(self) -> None:
        """Drop the loss of a step that the optimizer skipped (overflow under fp16)."""
        self._losses.clear()

    def after_optimizer_step(
        self,
        step: int,
        learning_rate: float,
        items: Optional[torch.Tensor],
        mean_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    ) -> Optional[dict[str, Any]]:
        """Decay the weights with the current lambda; every ``control_frequency`` steps, measure and decide again.

        ``step``: number of this optimizer step, from 1. ``items``: supervised tokens of the window; their mean over
        ranks must be the tokens of all ranks.

        Returns the history row of a decision, or None between decisions. If nothing is steered, a decision is only a
        measurement, and lambda stays 0.
        """
        self._close_window(items)
        shrink = control.shrink_fraction(self.config, self.state, learning_rate)
        if shrink > 0:
            self.prior.decay(shrink, seed=(self._seed << 32) + step)
            self.state = control.with_applied_shrink(self.state, shrink)
        if step % self._decision_interval and step != self.config.max_steps:
            return None
        measurement = self._measure(step, learning_rate, mean_over_ranks)
        if measurement is None:
            return None
        self.state = control.decide(self.config, self.state, measurement)
        if measurement.data_bpt <= 0:
            self._add_notice(
                "S is not measured where the trained loss is not above 0: it was "
                f"{measurement.data_bpt * NATS_PER_BIT:.3g} at step {step}. Such a loss, for instance of policy "
                "gradients, is not a description length. "
                f"{'Lambda stays as it was in such steps. ' if self.steers else ''}"
                "Leave the regularization loop out (regularization=None)"
            )
        if self.steers:
            self._check_progress(measurement)
        return self._row(measurement, shrink)

    def _close_window(self, items: Optional[torch.Tensor]) -> None:
        """Add up the losses of the step, and keep them with its tokens until the next measurement."""
        if items is None and self.progress.tokens_n is None:
            raise ControlError(
                "the stock loop does not count supervised tokens for this model, so N of ParamBPT is unknown; "
                "give regularization_tokens (scu_tokens for the commands): the supervised tokens of one pass over the "
                "training data"
            )
        loss = second_try(
            lambda: torch.stack([loss.float() for loss in self._losses]).sum(), "adding up the losses of a step"
        )
        self._losses.clear()
        self._interval.append((loss, 1.0 if items is None else items))

    def _measure(self, step: int, learning_rate: float, mean_over_ranks: Callable) -> Optional[control.Measurement]:
        """Return the measurement; None while no token was learned, so that N cannot be estimated yet. The steps up to
        then count in the next measurement."""
        steps, (losses, counts) = len(self._interval), zip(*self._interval, strict=True)
        counts = [count if torch.is_tensor(count) else torch.tensor(count, dtype=torch.float64) for count in counts]
        distance, read = self.prior.squared_distance_with([*losses, *counts])
        add = partial(_own_share, read[:steps], read[steps:], distance)
        own = second_try(add, "adding up the losses since the last decision")
        # Under DDP, every rank holds its own share of the loss and the same weights. The mean makes loss and tokens
        # global, and the distance equal: ranks that round differently must not decay differently.
        nats, tokens, squared_distance = mean_over_ranks(own).tolist()
        if self.progress.tokens_n is None and not tokens:
            return None
        self._interval.clear()
        self.progress.tokens_seen += tokens
        if self.progress.tokens_n is None:
            self.progress.tokens_n = tokens / steps * self._steps_per_epoch
        return control.Measurement(
            step=step,
            steps=steps,
            data_bpt=nats / max(tokens, 1e-300) / NATS_PER_BIT,
            param_bpt=param_bpt(squared_distance, self.settings.sigma, self.progress.tokens_n),
            learning_rate=learning_rate,
            gain=self.progress.gain,
        )

    def share_interval(self, mean_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace this rank's windows since the last decision by their mean over ranks, because one rank saves for all.
        If there are several, all of them must call this before a checkpoint."""
        if not self._interval:
            return
        own = torch.tensor([[float(loss) * float(items), float(items)] for loss, items in self._interval])
        shared = mean_over_ranks(own.double())
        self._interval = [(nats / items.clamp(min=1e-300), float(items)) for nats, items in shared]

    # -- can it act, can it arrive -------------------------------------------------------------------------------------

    def _check_progress(self, measurement: control.Measurement) -> None:
        count = self.state.decisions
        # At powers of two: the gain changes when adapters have moved far from their start, and a probe costs a
        # measurement.
        if self.config.actuator == "decoupled" and count >= PROBE_DECISION and count & (count - 1) == 0:
            self._probe_gain()
        if self.settings.law in ("model", "original") and self.state.target_s is not None:
            self._predict_end(measurement)
            self._check_response()

    def _probe_gain(self) -> None:
        """Measure how strongly decay changes the description length, and add a notice if it hardly does."""
        gain = self.prior.measured_gain()
        if gain is None:
            return
        if gain < SMALLEST_GAIN:
            self._add_notice(
                f"SCU cannot act: decaying the weights by 1 % moves their description length by {gain:.3g} times "
                f"that instead of {control.DECOUPLED_GAIN:g} times; keep trainable weights in float32"
            )
        else:
            self.progress.gain = gain

    def _predict_end(self, measurement: control.Measurement) -> None:
        """Add a notice if S will not reach its target by the end of the run."""
        y, last = self.state.log_ratio, self.config.max_steps
        if self.progress.outlook_done or y is None:
            return
        if self.state.reached_step is not None:
            self.progress.outlook_done = True
            return
        if self.state.lam > 0 and self.config.name == "model":
            # Lambda slows S down, so its growth does not show where S would go without lambda.
            if measurement.step >= last and self.state.s_ema < (1 - BAND) * self.state.target_s:
                self._add_notice(
                    f"SCU slowed S before its target: S is {self.state.s_ema:.3g} after {last} steps, below the target "
                    f"{self.state.target_s:.3g}, because S approaches it over a few times scu_time_constant "
                    f"({self.config.time_constant:g} steps); lower scu_time_constant, or train longer"
                )
            return
        if self.progress.milestone is None:
            if measurement.step >= OUTLOOK_STEPS:
                self.progress.milestone = [measurement.step, y]
            return
        early_step, early_y = self.progress.milestone
        if measurement.step < 2 * early_step:
            return
        # Predict again whenever the number of steps has doubled, because early growth suggests too high an end.
        self.progress.milestone = [measurement.step, y]
        predicted_s, is_reachable = forecast_s(
            (int(early_step), early_y), (measurement.step, y), last, self.state.target_s
        )
        if not is_reachable:
            self.progress.outlook_done = True
            self._add_notice(
                f"SCU target out of reach: S is {self.state.s_ema:.3g} after {measurement.step} of {last} steps and "
                f"will grow to about {predicted_s:.3g} by the end, below the target {self.state.target_s:.3g}; "
                "lower scu_target_s, raise the learning rate or train longer"
            )

    def _check_response(self) -> None:
        self.progress.stuck_decisions = self.progress.stuck_decisions + 1 if self.state.saturated == "high" else 0
        if self.progress.stuck_decisions >= STUCK_DECISIONS and self.state.s_ema > (1 + BAND) * self.state.target_s:
            self._add_notice(
                f"SCU has lost control: lambda has been at its upper bound {self.state.lam:.3g} for "
                f"{self.progress.stuck_decisions} decisions and S is still {self.state.s_ema:.3g}, above the target "
                f"{self.state.target_s:.3g}; raise scu_max_shrink (model law) or scu_lambda_max, or lower the "
                "learning rate"
            )

    def _check_penalty_acts(self, loss_scale: float) -> None:
        """Add a notice if the penalty is too weak to matter, even at the highest lambda."""
        if self.state.decisions != PROBE_DECISION:
            return
        gradient, distance = self.prior.gradient_norms()
        ceiling = penalty_coefficient(self.config.lambda_max, self.settings.sigma, self.progress.tokens_n) * loss_scale
        if gradient > 0 and ceiling * distance < 1e-4 * gradient:
            self._add_notice(
                f"SCU cannot act: even at lambda {self.config.lambda_max:g} the penalty's gradient is "
                f"{ceiling * distance / gradient:.2g} of the loss's gradient; raise scu_lambda_max, lower scu_sigma or "
                "use scu_law: model"
            )

    def _add_notice(self, text: str) -> None:
        """Report each finding once: the text before the colon identifies it, the figures after it change."""
        finding = text.partition(":")[0]
        if not any(notice.startswith(f"{finding}:") for notice in self.progress.notices):
            self.progress.notices.append(text)

    # -- reports -------------------------------------------------------------------------------------------------------

    def description(self) -> dict[str, Any]:
        """Return the controller as used: settings, resolved defaults, N, and the target that was found or given."""
        return {
            "settings": asdict(self.settings),
            "resolved": asdict(self.config),
            "sigma": self.settings.sigma,
            "tokens_n": self.progress.tokens_n,
            "target_s": self.state.target_s,
        }

    def observe_held_out(self, held_out_bpt: float) -> None:
        if self.settings.target_s == "auto":
            self.state = control.observe_held_out(self.config, self.state, held_out_bpt)

    def _row(self, measurement: control.Measurement, shrink: float) -> dict[str, Any]:
        state = self.state
        return {
            "step": measurement.step,
            "tokens": self.progress.tokens_seen,
            "loss": measurement.data_bpt * NATS_PER_BIT,
            "data_bpt": measurement.data_bpt,
            "param_bpt": measurement.param_bpt,
            "s": None
            if measurement.data_bpt <= 0
            else control.information_ratio(measurement.param_bpt, measurement.data_bpt),
            "s_ema": state.s_ema,
            "s_target": state.target_s,
            "error": None if state.target_s is None or state.s_ema is None else state.s_ema - state.target_s,
            "integral": state.integral,
            "lambda": state.lam,
            "saturated": state.saturated,
            "shrink": shrink,
            "growth": state.growth,
            "learning_rate": measurement.learning_rate,
        }


def _own_share(
    losses: Sequence[torch.Tensor], counts: Sequence[torch.Tensor], squared_distance: torch.Tensor
) -> torch.Tensor:
    """Return this rank's nats, tokens and squared distance, (3,) in float64 on the CPU, like all arguments."""
    means = torch.stack([loss.double() for loss in losses])
    items = torch.stack([count.double() for count in counts])
    return torch.stack([(means * items).sum(), items.sum(), squared_distance])


def resolve(settings: RegularizationSettings, max_steps: int) -> control.ControllerConfig:
    """Return the settings in the form that the law's arithmetic uses, with every default filled in."""
    low, high = settings.lambda_bounds
    resolved = {
        "name": settings.law,
        "actuator": settings.resolved_actuator,
        "target_s": None if settings.target_s == "auto" else settings.target_s,
        "ema_alpha": settings.resolved_ema_alpha,
        "deadband": settings.resolved_deadband,
        "lambda_min": low,
        "lambda_max": high,
        "wait_for_target": settings.stop_at_target,
        "max_steps": max_steps,
    }
    as_given = {item.name for item in fields(control.ControllerConfig)} - resolved.keys()
    return control.ControllerConfig(**resolved, **{name: getattr(settings, name) for name in as_given})


def prior_class_for(trainer, settings: RegularizationSettings) -> type[Prior]:
    """Return the class that accesses the trained weights under this launcher. Raises ControlError for launchers under
    which this process does not have the trained weights."""
    if trainer.is_fsdp_enabled:
        raise ControlError(
            "FSDP keeps the trained weights in shards that lambda cannot reach; use DDP (torchrun, accelerate) or "
            "ZeRO-1/2, or set scu: false"
        )
    if trainer.args.n_gpu > 1:
        raise ControlError(
            f"one process drives {trainer.args.n_gpu} GPUs (DataParallel), where the loss of a step is not known "
            "exactly; start one process per GPU with torchrun or accelerate launch, or set scu: false"
        )
    if trainer.is_deepspeed_enabled:
        stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
        check_zero_stage(stage, settings.resolved_actuator if settings.steers else "none")
        return ZeroPrior
    return Prior
