"""The training step. START HERE.

``SCUTrainer`` is the stock ``transformers.Trainer`` with controllers attached. It adapts and computes nothing itself: S
and lambda live in ``regularizer.py``, their arithmetic in ``control/``. One optimizer step runs

    training_step (once per accumulation batch)   forward, backward; the loss is handed to the regularizer
      last batch of the window                    penalty actuator: lambda's gradient is added
    stock loop                                    clip, optimizer.step
    RegularizationCallback.on_optimizer_step      decoupled actuator pulls, S is measured, lambda is decided

With ``regularization=None`` none of this runs, and the result is the stock Trainer's bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer

from scu_trainer.errors import CheckpointError
from scu_trainer.run_files import write_json
from scu_trainer.settings import RegularizationSettings
from scu_trainer.train.callbacks import RegularizationCallback
from scu_trainer.train.regularizer import Regularizer, prior_class_for

STATE_FILE = "scu_state.json"
PRIOR_FILE = "scu_prior.safetensors"


class SCUTrainer(Trainer):
    """``transformers.Trainer`` with a feedback loop on the strength of regularization.

    Takes everything that the stock Trainer takes, and

    regularization: ``RegularizationSettings``, or None for the stock Trainer.
    regularization_tokens: N of ParamBPT, the supervised tokens of one pass over the training data. None: estimated from
    the
        first optimizer step. ``RegularizationSettings.tokens`` overrides both.

    Raises ControlError where lambda could not reach the trained weights (FSDP, ZeRO-3, float16 weights).
    """

    def __init__(
        self,
        *args: Any,
        regularization: Optional[RegularizationSettings] = None,
        regularization_tokens: Optional[float] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.regularizer: Optional[Regularizer] = None
        if regularization is not None:
            prior_class = prior_class_for(self, regularization)
            self.regularizer = Regularizer(regularization, self.model, regularization_tokens, prior_class)
            self.regularization_callback = RegularizationCallback(self)
            self.add_callback(self.regularization_callback)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.regularizer is not None:
            self.regularizer.observe_loss(loss)
            self.regularization_callback.items_in_window = num_items_in_batch
            if self.accelerator.sync_gradients:
                with self.regularization_callback.timed():
                    self.regularizer.add_penalty(self._loss_scale())
        return loss

    def log(self, logs: dict[str, float], start_time: Optional[float] = None) -> None:
        if self.regularizer is not None and "loss" in logs:
            logs.update(self.regularization_callback.scalars())
        super().log(logs, start_time)

    def _loss_scale(self) -> float:
        scaler = self.accelerator.scaler
        return scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0

    def _get_learning_rate(self) -> float:
        rate = super()._get_learning_rate()
        return rate if self.regularizer is None else rate * self.regularization_callback.rate_factor

    # Controller state travels with the optimizer's: both are what a checkpoint needs to go on, not to be used.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.regularizer is not None:
            self.regularization_callback.before_checkpoint()
        if self.regularizer is not None and self.args.should_save:
            # Base weights are read again on resume; adapters start at random and would be lost.
            prior = self.regularizer.prior.state_dict() if _has_adapters(self.model) else {}
            if prior:
                save_file({name: w.contiguous() for name, w in prior.items()}, Path(output_dir) / PRIOR_FILE)
            write_json(Path(output_dir) / STATE_FILE, self.regularizer.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.regularizer is not None and checkpoint is not None:
            self.regularizer.load_state_dict(*_read_controller_state(Path(checkpoint)))


def _has_adapters(model: torch.nn.Module) -> bool:
    return hasattr(model, "peft_config")


def _read_controller_state(checkpoint: Path) -> tuple[dict[str, Any], Optional[dict[str, torch.Tensor]]]:
    state_file, prior_file = checkpoint / STATE_FILE, checkpoint / PRIOR_FILE
    if not state_file.is_file():
        raise CheckpointError(
            f"{checkpoint} holds no {STATE_FILE}: it was written without the regularization loop or with "
            "save_only_model; "
            "resume with scu: false, or start anew from its weights with model_name_or_path"
        )
    return json.loads(state_file.read_text()), load_file(prior_file) if prior_file.is_file() else None
