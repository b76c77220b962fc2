"""The loss of a training forward, and in the same forward the loss of each of its rows.

    stock      the model computes its loss; the rows' losses are read from its logits
    chunked    a causal language model's head is left out of its forward, and its loss is taken from the hidden states,
               some rows at a time: the logits never exist as a whole (``train/losses.py``)

The chunked path leaves the model's own code in place: while its forward runs, its output head hands the hidden states
through and its ``loss_function`` is ours. Whether that gives the model's loss is asked of the model itself, once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Optional, Protocol

import torch
from transformers.loss.loss_utils import LOSS_MAPPING

from scu_trainer.errors import ControlError, SettingsError
from scu_trainer.train.losses import chunked_linear_cross_entropy, row_losses
from scu_trainer.train.reduction import tolerance, untouched
from scu_trainer.train.row_readings import Reading, RowLosses, find_reading, shifted
from scu_trainer.train.rows import PADDING, has_time

if TYPE_CHECKING:
    from scu_trainer.train.trainer import SCUTrainer

logger = logging.getLogger("scu_trainer")

LARGE_VOCABULARY = 16_384
"""Words from which on the logits, not the model, decide how much memory a step takes."""

COLUMNS_TO_ASK = 32


class Rows(Protocol):
    """Who wants to know of rows: the curriculum."""

    needs_losses: bool

    def weights_of(self, ids: torch.Tensor) -> Optional[torch.Tensor]:
        """Factor of each row's loss; None where all are 1."""

    def record(self, ids: torch.Tensor, losses: RowLosses) -> None: ...

    def quarantine(self, ids: torch.Tensor) -> None: ...

    def found(self, reading: Optional[Reading]) -> None: ...


class LossPath:
    """The training loss of one ``SCUTrainer``. ``rows``: None where nobody asks for the losses of rows."""

    def __init__(self, trainer: SCUTrainer, chunked: str, rows: Optional[Rows] = None) -> None:
        self.trainer, self.rows = trainer, rows
        self.reading: Optional[Reading] = None
        self._asked_reading = False
        self._chunked: Optional[bool] = None  # not known yet
        self._wanted = chunked

    def loss(self, model: torch.nn.Module, inputs: Any, num_items: Any, stock: Callable) -> torch.Tensor:
        """``stock(model, inputs, return_outputs, num_items)``: the Trainer's ``compute_loss``."""
        if self.rows is None:
            return self._forward(model, inputs, num_items, stock, None)[0]
        ids, inputs = inputs.get("sample_index"), without_index(inputs)
        if ids is None:
            raise ControlError("a batch came without sample_index: it is not from this trainer's own data loader")
        weights = self.rows.weights_of(ids)
        loss, losses = self._forward(model, inputs, num_items, stock, weights)
        if losses is None:
            return loss
        bad = ~torch.isfinite(losses.sums)
        if bool(bad.any()):
            return self._without(model, inputs, num_items, stock, ids, bad)
        self.rows.record(ids, losses)
        return loss

    def _without(self, model, inputs, num_items, stock, ids, bad: torch.Tensor) -> torch.Tensor:
        """The loss of the rows whose loss is a number; the others are set aside, and said."""
        self.rows.quarantine(ids[bad])
        model = self.trainer.model  # not DDP's: a forward that other ranks do not run must not speak to them
        good = (~bad).nonzero().flatten()
        if len(good):
            kept = {name: _only(value, good, len(ids)) for name, value in inputs.items()}
            return self.loss(model, type(inputs)({**kept, "sample_index": ids[good]}), num_items, stock)
        # Every trained weight gets a gradient of zero: ranks wait for each of them.
        return sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros((), device=ids.device))

    def _forward(self, model, inputs, num_items, stock, weights) -> tuple[torch.Tensor, Optional[RowLosses]]:
        if self._use_chunked(inputs):
            return self._chunked_forward(model, inputs, num_items, stock, weights)
        if self.rows is None:
            return stock(model, inputs, False, num_items), None
        return self._stock_forward(model, inputs, num_items, stock, weights)

    # -- the stock loss ------------------------------------------------------------------------------------------------

    def _stock_forward(self, model, inputs, num_items, stock, weights):
        labels = inputs.get("labels")
        loss, outputs = stock(model, inputs, True, num_items)
        if not self._asked_reading:
            self._find_reading(outputs, labels, loss, num_items)
        if self.reading is None:
            return loss, None
        losses = self.reading.rows(outputs, labels)
        if weights is not None:
            # The model's loss is its rows' sum times one factor, whatever it is divided by.
            total = losses.sums.sum()
            factor = torch.where(total == 0, 0.0, loss.detach() / total)  # nothing left to learn: 0 / 0
            loss = factor * (weights * self.reading.sums_with_gradient(outputs, labels)).sum()
        return loss, losses

    def _find_reading(self, outputs, labels, loss, num_items) -> None:
        self.reading = find_reading(
            outputs, labels, float(loss.detach()), num_items, self.trainer.accelerator.num_processes
        )
        if not bool(torch.isfinite(loss)):
            return  # ask again: this batch tells nothing, but which of its rows are to be set aside
        self._asked_reading = True
        self.rows.found(self.reading)

    # -- the chunked loss ----------------------------------------------------------------------------------------------

    def _use_chunked(self, inputs: Any) -> bool:
        if self._chunked is None:
            self._chunked = self._wanted != "never" and self._may_chunk(inputs)
            if self._chunked and self.rows is not None:
                self._asked_reading, self.reading = True, Reading("shifted", True)
                self.rows.found(self.reading)
        return self._chunked

    def _may_chunk(self, inputs: Any) -> bool:
        obstacle = _obstacle(self.trainer)
        head = None if obstacle else _head_of(_inner(self.trainer.model))
        if self._wanted == "auto" and (obstacle or head.out_features < LARGE_VOCABULARY):
            return False
        if not obstacle and not self._agrees(inputs):
            obstacle = "it does not give this model's loss"
        if obstacle and self._wanted == "always":
            raise SettingsError(f"chunked_loss: always, but {obstacle}; use chunked_loss: auto or never")
        if obstacle:
            logger.warning("the chunked loss is not used: %s", obstacle)
        return not obstacle

    def _agrees(self, inputs: Any) -> bool:
        """Whether both paths give the same loss on one short row."""
        trainer = self.trainer
        short = _short(inputs, _head_of(_inner(trainer.model)).out_features)
        if short is None:
            return False

        def asked(context) -> float:
            with context, trainer.compute_loss_context_manager():
                return float(trainer.model(**short)["loss"])

        with untouched(trainer.model), torch.no_grad():
            stock = asked(contextlib.nullcontext())
            ours = asked(_headless(trainer.model, None, None, lambda tokens: None))
        bound = tolerance(trainer.model, trainer.accelerator.mixed_precision != "no")
        return abs(stock - ours) <= bound * max(abs(stock), 1e-6)

    def _chunked_forward(self, model, inputs, num_items, stock, weights):
        tokens: list[torch.Tensor] = []
        labels = inputs["labels"]
        with _headless(self.trainer.model, weights, labels.size(1), tokens.append):
            loss = stock(model, inputs, False, num_items)
        if self.rows is None:
            return loss, None
        targets = inputs["shift_labels"] if "shift_labels" in inputs else shifted(labels)
        return loss, RowLosses(*row_losses(tokens[-1], len(labels), targets))


def without_index(inputs: Any) -> Any:
    """What the model is to see of a batch."""
    return type(inputs)({name: value for name, value in inputs.items() if name != "sample_index"})


def _only(value: Any, rows: torch.Tensor, count: int) -> Any:
    if torch.is_tensor(value) and value.dim() > 0 and value.size(0) == count:
        return value[rows.to(value.device)]
    if isinstance(value, (list, tuple)) and len(value) == count:
        return type(value)([value[row] for row in rows.tolist()])
    return value


# -- the model's head --------------------------------------------------------------------------------------------------


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, without adapters' wrapper."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _head_of(inner: torch.nn.Module) -> Optional[torch.nn.Module]:
    output = getattr(inner, "get_output_embeddings", None)
    return output() if callable(output) else None


def _obstacle(trainer: SCUTrainer) -> Optional[str]:
    """Why this trainer's model must compute its loss itself; None if it need not."""
    inner, args = _inner(trainer.model), trainer.args
    head = _head_of(inner)
    if getattr(inner, "loss_function", None) is not LOSS_MAPPING["ForCausalLM"]:
        return f"{type(inner).__name__} has no causal language model's loss"
    if type(head) is not torch.nn.Linear or hasattr(head, "_hf_hook") or hasattr(head.weight, "ds_id"):
        return f"the output head is a {type(head).__name__} that others change or shard"
    if trainer.is_fsdp_enabled or args.torch_compile or args.use_liger_kernel:
        return "FSDP, torch_compile and use_liger_kernel bring their own forward"
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        return "compute_loss_func and label_smoothing_factor need the logits"
    if any(name.endswith("softcapping") and value for name, value in vars(inner.config).items() if "logit" in name):
        return "the logits are soft-capped"
    return None


@contextlib.contextmanager
def _headless(
    model: torch.nn.Module, weights: Optional[torch.Tensor], width: Optional[int], seen: Callable[[torch.Tensor], None]
) -> Iterator[None]:
    """Inside, the model's forward computes its loss by chunks. ``seen`` gets the token losses, shape (rows * time,)."""
    inner = _inner(model)
    head = _head_of(inner)

    def loss_function(logits, labels, vocab_size=None, num_items_in_batch=None, shift_labels=None, **kwargs):
        targets = (shifted(labels) if shift_labels is None else shift_labels).to(logits.device)
        loss, tokens = chunked_linear_cross_entropy(
            logits.reshape(-1, logits.size(-1)),
            head.weight,
            head.bias,
            targets.reshape(-1),
            token_weights=None if weights is None else weights.repeat_interleave(width),
            divisor=num_items_in_batch,
        )
        seen(tokens)
        return loss

    own_loss = inner.__dict__.get("_loss_function")
    head.forward = lambda hidden: hidden
    inner.loss_function = loss_function
    try:
        yield
    finally:
        del head.forward
        if own_loss is None:
            inner.__dict__.pop("_loss_function", None)
        else:
            inner.loss_function = own_loss


def _short(inputs: Any, words: int) -> Optional[Mapping[str, Any]]:
    """The first columns of the first row, every one of them learned."""
    ids = inputs.get("input_ids")
    if not torch.is_tensor(ids) or ids.dim() != 2 or not has_time("labels", inputs.get("labels")):
        return None
    short = {
        name: value[:1, :COLUMNS_TO_ASK] for name, value in inputs.items() if name in PADDING and has_time(name, value)
    }
    if "attention_mask" in short:
        short["attention_mask"] = torch.ones_like(short["attention_mask"])
    return {**short, "labels": short["input_ids"].clamp(max=words - 1)}
