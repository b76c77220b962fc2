"""Any module of one's own in the trainer's loops: ``wrap(module, loss=...)``.

    model = wrap(Net(), loss=nn.CrossEntropyLoss())
    trainer = SCUTrainer(model, args, train_dataset=pairs, ...)     # items are tuples (x, y) or dicts
    trainer.train()

The loss of each row is known, so that batches can be cut and samples be chosen by their losses; saved files load into
the bare module.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from scu_trainer.data.items import TARGET, ItemCollator, Place, first_item
from scu_trainer.errors import DataError, ModelError, SettingsError
from scu_trainer.train.loss_path import without_index
from scu_trainer.train.reduction import untouched
from scu_trainer.train.rows import pick
from scu_trainer.train.wrapped_loss import RowLoss, rows_to_ask

if TYPE_CHECKING:
    from scu_trainer.train.trainer import SCUTrainer

logger = logging.getLogger("scu_trainer")


def wrap(
    module: nn.Module, loss: Any, *, targets: Optional[Place] = None, inputs: Optional[Sequence[Place]] = None
) -> WrappedModule:
    """Make a plain module trainable by ``SCUTrainer``.

    Args:
        module: takes what the dataset gives beside the target; returns a tensor, a tuple or a mapping of tensors with
            one entry per row along dimension 0.
        loss: ``loss(outputs, targets)``, a function or a module without weights. It may return the mean over rows,
            their sum, or one entry per row; a target of -100 is not learned, as in torch's cross-entropy. A loss in
            which rows act on each other works too: batches are then taken whole.
        targets: position in a tuple, or key of a dict, of the target. None: the last of a tuple; ``labels`` or
            ``label``.
        inputs: positions or keys of what the module takes, in its order. None: the rest of a tuple; of a dict the keys
            that its forward names.

    Raises ModelError where module or loss are none.
    """
    return WrappedModule(module, loss, targets, inputs)


class WrappedModule(nn.Module):
    """``module`` with a loss, as the stock Trainer calls a model. ``data_collator``: makes its batches.

    Its state_dict is the module's own.
    """

    config = None  # the stock Trainer looks for one where labels are smoothed

    def __init__(
        self, module: nn.Module, loss: Any, targets: Optional[Place], inputs: Optional[Sequence[Place]]
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ModelError(f"wrap takes a torch.nn.Module, this is a {type(module).__name__}")
        self.module = module
        self.keys_to_ignore_at_inference = ["losses"]
        self.row_loss = RowLoss(loss)
        self._parameters_of_forward = _named_parameters(module)
        self._in_order = inputs is not None
        self.data_collator = ItemCollator(targets, inputs, self._parameters_of_forward)

    def forward(
        self, labels: Optional[torch.Tensor] = None, num_items_in_batch: Any = None, **inputs: Any
    ) -> dict[str, Any]:
        """``loss``, ``logits`` (what the module returns) and, in training, ``losses`` of the rows; without ``labels``
        only ``logits``."""
        outputs = self._outputs(inputs)
        logits = _logits(outputs)
        if labels is None:
            if self.training:
                raise DataError(
                    "a training batch has no target; let the dataset give (x, y) or a dict with labels, or name the "
                    "target: wrap(module, loss=..., targets=...)"
                )
            return {"logits": logits}
        loss, losses = self.row_loss(outputs, labels, num_items_in_batch)
        found = {"loss": loss, "logits": logits}
        # Where logits and labels tell a row's loss by themselves, they also tell of classes.
        return found if losses is None or self.row_loss.is_plain else {**found, "losses": losses}

    def _outputs(self, inputs: Mapping[str, Any]) -> Any:
        names = self._parameters_of_forward
        by_name = not self._in_order and (names is None or all(name in names for name in inputs))
        if by_name and not _is_of_tuple(inputs):
            return self.module(**inputs)
        return self.module(*inputs.values())

    @torch.no_grad()
    def ask(self, inputs: Mapping[str, Any]) -> None:
        """Find out how the loss puts rows together, on a few rows of a batch; nothing is changed by it."""
        rows = len(inputs[TARGET])
        few = pick(dict(inputs), torch.tensor(rows_to_ask(inputs[TARGET])), rows)
        targets = few.pop(TARGET)
        with untouched(self):
            self.row_loss.ask(self._outputs(few), targets)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def _is_of_tuple(inputs: Mapping[str, Any]) -> bool:
    return all(name == "inputs" or name.startswith("input_") for name in inputs)


def _named_parameters(module: nn.Module) -> Optional[list[str]]:
    """Names that the module's forward takes; None: any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]


def _logits(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs["logits"] if "logits" in outputs else tuple(outputs.values())
    return tuple(outputs) if isinstance(outputs, list) else outputs


# -- the trainer's side ------------------------------------------------------------------------------------------------


def adopt(trainer: SCUTrainer) -> None:
    """Let a trainer of a wrapped module take its collator, and all columns; does nothing to other models.

    Raises DataError for a first item that cannot be trained on, SettingsError for arguments that change the loss.
    """
    model = trainer.model
    if not isinstance(model, WrappedModule):
        return
    if trainer.args.label_smoothing_factor:
        raise SettingsError(
            "label_smoothing_factor would take the place of the loss given to wrap; drop it, and use for instance "
            "torch.nn.CrossEntropyLoss(label_smoothing=0.1)"
        )
    trainer.args.remove_unused_columns = False  # the collator takes what the module needs
    if trainer.data_collator is not default_data_collator:
        return
    trainer.data_collator = model.data_collator
    rows = trainer.train_dataset
    if rows is None or isinstance(rows, IterableDataset) or not len(rows):
        return
    left_out = model.data_collator.check(first_item(rows))
    if left_out:
        logger.warning("the module does not take %s: left out of every item", ", ".join(left_out))


def countable(trainer: SCUTrainer, batches: list[Any]) -> list[Any]:
    """``batches`` for the stock Trainer's counting of items: what the mean of a wrapped module's loss runs over. Those
    of other models as they are."""
    model = trainer.model
    if not isinstance(model, WrappedModule) or any(not torch.is_tensor(batch.get(TARGET)) for batch in batches):
        return batches
    if model.row_loss.kind is None and batches:
        with trainer.accelerator.autocast():
            model.ask(trainer._prepare_inputs(without_index(batches[0])))
    return [{TARGET: model.row_loss.counted(batch[TARGET])} for batch in batches]
