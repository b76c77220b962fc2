"""Distillation as a loop: the student's loss includes its distance to a larger model's predictions for the same rows.

    loss = (1 - weight) · task loss + weight · T² · KL(teacher || student), both softened by the temperature T

Hinton, Vinyals and Dean 2015, Distilling the Knowledge in a Neural Network (arXiv:1503.02531), section 2; T² keeps the
size of the second gradient independent of T. Both parts are sums over learned labels, divided by
``num_items_in_batch``, so they add up over micro-batches, accumulation and ranks as the task loss does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch
from torch import nn
from torch.nn import functional
from transformers import Trainer

from scu_trainer.errors import ControlError
from scu_trainer.models.vision.inputs import process_images_for
from scu_trainer.train.loop import Loop
from scu_trainer.train.loss.analysis import mixing_modules
from scu_trainer.train.loss.rows.model_loss import comes_from, inner_model
from scu_trainer.train.loss.rows.row_readings import logits_of, shifted
from scu_trainer.train.step.batches.rows import NOT_LEARNED

PLAIN_LOSSES = ("ForCausalLM", "ForImageClassification", "ForSequenceClassification")
"""Losses of transformers that are the plain cross-entropy, of classes or of next tokens."""


class Distillation(Loop):
    """Also train a trainer's model on ``teacher``: ``SCUTrainer(..., callbacks=[Distillation(teacher)])``.

    teacher: takes the student's inputs and predicts the same tokens or classes. It is frozen, put into evaluation mode
        and not saved. If the vocabularies have different sizes, only words that both have count.
    weight: of the teacher's part, above 0 and up to 1. temperature: above 0.

    The model is a causal language model or a classifier with the plain cross-entropy as its loss, which is computed
    from the logits, through the stock ``compute_loss_func`` hook. Evaluations report the task loss only. Raises
    ControlError for other losses.
    """

    name = "distillation"
    state_file = "distillation_state.json"

    def __init__(self, teacher: nn.Module, weight: float = 0.5, temperature: float = 2.0) -> None:
        self.teacher = teacher.eval().requires_grad_(False)
        self.weight, self.temperature = weight, temperature
        self._logits: Optional[torch.Tensor] = None  # the teacher's, at learned positions, shape (labels, classes)
        self._last_losses: Optional[tuple[torch.Tensor, torch.Tensor]] = None

    def attach(self, trainer: Trainer) -> None:
        super().attach(trainer)
        _require_plain_loss(trainer)
        self.teacher.to(trainer.args.device)
        trainer.compute_loss_func = self

    def begin(self) -> None:
        self._steps, self._sums, self._window_losses = 0, [0.0, 0.0], []

    # -- the loss ------------------------------------------------------------------------------------------------------

    def on_forward(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the teacher first, so that its activations are freed before the student's are computed."""
        self._logits, model = None, self.trainer.model
        if not model.training or "labels" not in inputs:
            return dict(inputs)
        inputs = process_images_for(inner_model(model), inputs)
        teacher_inputs = {name: value for name, value in inputs.items() if name != "labels"}
        if teacher_inputs.get("input_ids") is not None:
            teacher_inputs["use_cache"] = False
        with torch.no_grad():
            logits = logits_of(self.teacher(**teacher_inputs))
            self._logits = logits[targets_of(inputs["labels"]).to(logits.device) != NOT_LEARNED]
        return inputs

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss for the stock Trainer, a scalar in nats. labels: (rows,), or (rows, time) of tokens."""
        logits, teacher_logits = logits_of(outputs), self._logits
        self._logits = None
        targets = targets_of(labels).to(logits.device)
        learned = targets != NOT_LEARNED
        divisor = learned.sum().clamp_min(1) if num_items_in_batch is None else num_items_in_batch
        divisor = divisor.to(logits.device) if torch.is_tensor(divisor) else divisor
        task = functional.cross_entropy(
            logits.float().flatten(0, -2), targets.flatten(), ignore_index=NOT_LEARNED, reduction="sum"
        )
        task = task / divisor
        if teacher_logits is None:
            return task
        distance = distance_to(teacher_logits.to(logits.device), logits[learned], self.temperature) / divisor
        loss = (1 - self.weight) * task + self.weight * distance
        # A copy, because the stock Trainer scales the loss in place.
        self._last_losses = loss.detach().clone(), task.detach()
        return loss

    def task_loss(self, loss: torch.Tensor) -> Optional[torch.Tensor]:
        """Return the task's part of ``loss``, scaled as the Trainer scaled the whole; None if no teacher took part."""
        if self._last_losses is None:
            return None
        whole, task = self._last_losses
        self._last_losses = None
        # The Trainer scaled the loss (share of the window, ranks), so scale the task loss alike. Skipped rows are 0.
        share = loss / whole
        return torch.where(torch.isfinite(share), task * share, 0.0)

    # -- what is logged ------------------------------------------------------------------------------------------------

    def on_loss(self, loss: torch.Tensor, num_items: Any) -> None:
        self._window_losses.append(torch.stack([loss, self.trainer.task_loss]))

    def on_step_taken_back(self) -> None:
        self._window_losses.clear()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if not self._window_losses:
            return
        loss, task = self.trainer.accelerator.reduce(torch.stack(self._window_losses).sum(0), "mean").tolist()
        self._window_losses.clear()
        self._steps += 1
        self._sums = [self._sums[0] + task, self._sums[1] + (loss - (1 - self.weight) * task) / self.weight]

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self._steps, self._sums = 0, [0.0, 0.0]

    def scalars(self) -> dict[str, float]:
        """Return means over the steps since the last log, in nats; weighted, they add up to the logged loss."""
        if not self._steps:
            return {}
        task, distance = (total / self._steps for total in self._sums)
        return {"distillation/task_loss": task, "distillation/teacher_distance": distance}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "sums": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._sums = state["steps"], state["sums"]

    def opening_lines(self) -> list[str]:
        weights = list(self.teacher.parameters())
        count, size_bytes = sum(w.numel() for w in weights), sum(w.nbytes for w in weights)
        return [
            f"teacher: {count:,} weights ({size_bytes / 2**20:,.0f} MiB), not trained and not saved; loss = "
            f"{1 - self.weight:g} of the task's + {self.weight:g} of the distance to the teacher at temperature "
            f"{self.temperature:g}"
        ]


def targets_of(labels: torch.Tensor) -> torch.Tensor:
    """Return the target of each logit: the next token for (rows, time), the class for (rows,)."""
    return shifted(labels) if labels.dim() == 2 else labels


def distance_to(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return T² · KL(teacher || student) in nats, summed over rows. Logits (rows, classes); only the first classes,
    which both have, count."""
    classes = min(teacher.size(-1), student.size(-1))
    wanted, found = (
        functional.log_softmax(logits[:, :classes].float() / temperature, dim=-1) for logits in (teacher, student)
    )
    return temperature**2 * functional.kl_div(found, wanted, reduction="sum", log_target=True)


def _require_plain_loss(trainer: Trainer) -> None:
    model = inner_model(trainer.model)
    kind = getattr(model, "loss_type", None)
    config = getattr(model, "config", None)
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        raise ControlError("a teacher replaces compute_loss_func and label_smoothing_factor; drop them")
    for owner in type(trainer).__mro__:
        if "compute_loss" in vars(owner) and not comes_from(owner, "transformers", "scu_trainer"):
            raise ControlError(
                f"compute_loss of {owner.__name__} is its own, and a teacher would replace it; drop one of them"
            )
    problem = getattr(config, "problem_type", None)
    if kind not in PLAIN_LOSSES or problem in ("regression", "multi_label_classification"):
        raise ControlError(
            f"the loss of {type(model).__name__} is its own ({kind}), but a teacher needs the cross-entropy of next "
            f"tokens or classes ({', '.join(PLAIN_LOSSES)}); leave the teacher out"
        )
    mixing = mixing_modules(model)
    if mixing is not None and "router" in mixing:
        raise ControlError(
            f"a teacher would drop {mixing} from the loss; set output_router_logits to false in its config"
        )
