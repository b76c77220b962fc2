"""Train your own module with the trainer's loops: ``wrap(module, loss=...)``.

    model = wrap(Net(), loss=nn.CrossEntropyLoss())
    trainer = SCUTrainer(model, args, train_dataset=pairs, ...)     # items are tuples (x, y) or dicts
    trainer.train()

The loss of each row is known, so batches can be split and a curriculum can choose rows by their losses. Saved files
load into the bare module.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Optional

import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, default_data_collator

from scu_trainer.data.items import TARGET, ItemCollator, Place, first_item, is_tuple_batch
from scu_trainer.errors import ControlError, DataError, ModelError, SettingsError
from scu_trainer.train.loss.analysis import restored_on_exit
from scu_trainer.train.loss.loss_path import without_sample_index
from scu_trainer.train.loss.wrapped_loss import RowLoss
from scu_trainer.train.loss.wrapped_rows import ROWS_TO_ASK, has_one_entry_per_row, join, rows_for_wrapped_trial
from scu_trainer.train.step.batches.rows import pick
from scu_trainer.train.step.distributed.ranks import from_most_urgent_rank
from scu_trainer.train.step.distributed.sharded import is_fsdp
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

logger = logging.getLogger("scu_trainer")


def wrap(
    module: nn.Module, loss: Any, *, targets: Optional[Place] = None, inputs: Optional[Sequence[Place]] = None
) -> WrappedModule:
    """Make a plain module trainable by ``SCUTrainer``.

    Args:
        module: takes what the dataset gives besides the target, and returns a tensor, a tuple or a mapping of tensors
            with one entry per row along dimension 0.
        loss: ``loss(outputs, targets)``, a function or a module without weights. It may return the mean over rows,
            their sum, or one entry per row. A target of -100 is not learned, as in torch's cross-entropy. A loss in
            which rows affect each other works too, but its batches are never split.
        targets: where the target is: a position in a tuple, or a key of a dict. None: the last position of a tuple;
            ``labels`` or ``label`` of a dict.
        inputs: positions or keys of the module's inputs, in its order. None: the rest of a tuple; of a dict the keys
            that its forward names.

    Raises ModelError if ``module`` is not a module, or ``loss`` cannot be used as a loss.
    """
    return WrappedModule(module, loss, targets, inputs)


class WrappedModule(nn.Module):
    """``module`` together with its loss, with the interface that the stock Trainer expects of a model.

    ``data_collator``: makes its batches. Its state_dict is the module's own.
    """

    config = None  # the stock Trainer reads it when labels are smoothed

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
        """Return ``loss``, ``logits`` (the module's outputs) and, unless logits and labels suffice to compute them,
        the ``losses`` of the rows. Without ``labels``, return ``logits`` only."""
        outputs = self._outputs(inputs)
        logits = tuple(outputs) if isinstance(outputs, list) else outputs
        if isinstance(outputs, Mapping):
            logits = outputs["logits"] if "logits" in outputs else tuple(outputs.values())
        if labels is None:
            if self.training:
                raise DataError(
                    "a training batch has no target; let the dataset return (x, y) or a dict with labels, or name "
                    "the target: wrap(module, loss=..., targets=...)"
                )
            return {"logits": logits}
        loss, losses = self.row_loss(outputs, labels, num_items_in_batch)
        found = {"loss": loss, "logits": logits}
        # Plain cross-entropy needs no losses: logits and labels give them, and the classes as well. The kind was found
        # in evaluation mode, and the module may return more outputs in training.
        follows_from_logits = self.row_loss.is_plain and torch.is_tensor(logits)
        return found if losses is None or follows_from_logits else {**found, "losses": losses}

    def _outputs(self, inputs: Mapping[str, Any]) -> Any:
        positional, named = self._arguments(inputs)
        return self.module(*positional, **named)

    def _arguments(self, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the (positional, named) arguments of the module's forward."""
        names = self._parameters_of_forward
        if self._in_order or is_tuple_batch(inputs):
            return list(inputs.values()), {}
        if names is None or all(name in names for name in inputs):
            return [], dict(inputs)
        if len(inputs) == 1:
            return list(inputs.values()), {}
        raise ModelError(
            f"the inputs are {', '.join(inputs)}, and {_signature(self.module)}: it is not clear which is which; "
            "name them as forward does, or give their order: wrap(module, loss=..., inputs=[...])"
        )

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Raise ModelError if the module's forward does not accept ``inputs`` or needs more."""
        positional, named = self._arguments(inputs)
        try:
            inspect.signature(self.module.forward).bind(*positional, **named)
        except TypeError as error:
            raise ModelError(
                f"an item gives the module {len(inputs)} inputs besides the target, but {_signature(self.module)}: "
                f"{error}; name those to pass: wrap(module, loss=..., inputs=[...])"
            ) from None

    @torch.no_grad()
    def find_loss_kind(self, batches: Sequence[Mapping[str, Any]], prepare: Callable[[Any], Any] = dict) -> None:
        """Find out, on a few rows of ``batches``, how the loss combines rows; nothing changes in the module.

        ``prepare``: moves rows to the module's device. No forward sees more than ``ROWS_TO_ASK`` rows.
        """
        few_rows = _pick_rows(batches, self.row_loss.seen)
        count = len(few_rows[TARGET])
        starts = range(0, count, ROWS_TO_ASK)
        with restored_on_exit(self):
            parts = [self._run(prepare(_slice_rows(few_rows, start, start + ROWS_TO_ASK))) for start in starts]
            has_rows = all(has_one_entry_per_row(outputs, len(targets)) for outputs, targets in parts)
            if has_rows and count % ROWS_TO_ASK == 0:  # all parts have one size, which the outputs may have by chance
                has_rows = self._keeps_fewer_rows(prepare(_slice_rows(few_rows, 0, ROWS_TO_ASK - 1)))
            joined = join([outputs for outputs, _ in parts]) if has_rows else None
            self.row_loss.find_kind(joined, torch.cat([targets for _, targets in parts]))

    def _run(self, inputs: Mapping[str, Any]) -> tuple[Any, torch.Tensor]:
        inputs = dict(inputs)
        targets = inputs.pop(TARGET)
        return self._outputs(inputs), targets

    def _keeps_fewer_rows(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the outputs still have one entry per row with another number of rows."""
        try:
            outputs, targets = self._run(inputs)
        except (RuntimeError, ValueError, IndexError) as error:  # for instance, the module needs an even number of rows
            if is_out_of_memory(error):
                raise
            return False
        return has_one_entry_per_row(outputs, len(targets))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _with_own_storage(self.module.state_dict(*args, **kwargs))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def _with_own_storage(weights: dict[str, Any]) -> dict[str, Any]:
    """Give every tensor memory of its own in the order of its axes, as safetensors requires.

    Tied weights are therefore stored twice, under all names that the module has for them; tensors in another memory
    format (channels_last) are copied.
    """
    places: set[int] = set()
    for name, tensor in weights.items():
        if type(tensor) is not torch.Tensor or not tensor.numel() or tensor.is_meta:  # shards have no storage
            continue
        weights[name] = tensor.clone() if tensor.data_ptr() in places else tensor.contiguous()
        places.add(tensor.data_ptr())
    return weights


def _pick_rows(batches: Sequence[Mapping[str, Any]], seen: Collection[int]) -> dict[str, Any]:
    """Return a row of each class not in ``seen`` and a few more, from all batches that can be joined with the first."""
    joinable = [batch for batch in batches if _row_shapes(batch) == _row_shapes(batches[0])]
    rows = torch.tensor(rows_for_wrapped_trial(torch.cat([batch[TARGET] for batch in joinable]), seen))
    parts, begin = [], 0
    for batch in joinable:
        count = len(batch[TARGET])
        own = rows[(rows >= begin) & (rows < begin + count)] - begin
        begin += count
        if len(own):
            parts.append(pick(dict(batch), own, count))
    return {name: join([part[name] for part in parts]) for name in parts[0]}


def _row_shapes(batch: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape[1:]) for name, value in batch.items() if torch.is_tensor(value)}


def _slice_rows(inputs: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    count = len(inputs[TARGET])
    return pick(inputs, torch.arange(start, min(stop, count)), count)


def _signature(module: nn.Module) -> str:
    return f"{type(module).__name__}.forward takes {inspect.signature(module.forward)}"


def _named_parameters(module: nn.Module) -> Optional[list[str]]:
    """Return the parameter names of the module's forward; None if it accepts any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]


# -- the trainer's side ------------------------------------------------------------------------------------------------


def prepare_wrapped_trainer(trainer: Trainer) -> None:
    """Prepare a trainer of a wrapped module: keep all columns, and use its collator if no other was given.

    Other models are left as they are.

    Raises DataError if the first item cannot be trained on, SettingsError for arguments that change the loss, and
    ControlError under FSDP.
    """
    model = trainer.model
    if not isinstance(model, WrappedModule):
        return
    if trainer.args.label_smoothing_factor:
        raise SettingsError(
            "label_smoothing_factor would replace the loss given to wrap; drop it, and use for instance "
            "torch.nn.CrossEntropyLoss(label_smoothing=0.1)"
        )
    if is_fsdp(trainer):
        raise ControlError(
            "wrap keeps the module's own weight names, but FSDP looks for the names of the wrapper; "
            "use DDP or DeepSpeed, or let the module's own forward return its loss and pass it to the trainer directly"
        )
    trainer.args.remove_unused_columns = False  # the collator takes what the module needs
    if trainer.data_collator is not default_data_collator:
        return
    trainer.data_collator = model.data_collator
    rows = trainer.train_dataset
    if rows is None or isinstance(rows, IterableDataset) or not len(rows):
        return
    item = first_item(rows)
    left_out = model.data_collator.check(item)
    model.check({name: part for name, part in model.data_collator([item]).items() if name != TARGET})
    if left_out:
        logger.warning("the module does not accept %s: dropped from every item", ", ".join(left_out))


def batches_to_count(trainer: Trainer, batches: list[Any]) -> list[Any]:
    """Return ``batches`` as the stock Trainer should count them: for a wrapped module, the terms of its loss's mean."""
    model = trainer.model
    if not isinstance(model, WrappedModule):
        return batches
    other = next((batch for batch in batches if not isinstance(batch, Mapping)), None)
    if other is not None:
        raise ModelError(
            f"data_collator gives a {type(other).__name__}; a wrapped module's batches are dicts with the module's "
            "inputs and labels. Leave data_collator out, or let it return such a dict"
        )
    if not batches or any(not torch.is_tensor(batch.get(TARGET)) for batch in batches):
        return batches
    few_rows = _rows_for_trial(trainer, batches)
    if few_rows is not None:
        with trainer.accelerator.autocast():
            model.find_loss_kind([few_rows], trainer._prepare_inputs)
    return [{TARGET: model.row_loss.counted(batch[TARGET])} for batch in batches]


def _rows_for_trial(trainer: Trainer, batches: Sequence[Mapping[str, Any]]) -> Optional[dict[str, Any]]:
    """Return a few rows that may show something new about the loss, or None.

    With several ranks, all get the rows of the first rank that has any: they must agree on the kind of the loss, and a
    forward of sharded weights needs them all.
    """
    row_loss, few_rows = trainer.model.row_loss, None
    row_loss.asks_alone = trainer.accelerator.num_processes == 1
    if row_loss.may_show_more(batch[TARGET] for batch in batches):
        few_rows = send_to_device(_pick_rows([without_sample_index(batch) for batch in batches], row_loss.seen), "cpu")
    if row_loss.asks_alone or row_loss.is_settled:
        return few_rows
    return from_most_urgent_rank(few_rows, int(few_rows is not None), trainer.accelerator.device)


def weighted_items(trainer: Trainer, batches: list[Any], items: Any, device: torch.device) -> Any:
    """Return ``items`` as counted by the stock Trainer; with class weights, the total weight of the labels. The weight
    is that of all ranks if the Trainer averages over the items of all."""
    model = trainer.model
    if items is None or not isinstance(model, WrappedModule) or model.row_loss.kind != "targets":
        return items
    weight = sum(model.row_loss.weights_of(batch[TARGET]) for batch in batches).to(device)
    is_shared = trainer.args.average_tokens_across_devices and trainer.args.world_size > 1
    return trainer.accelerator.gather(weight).sum() if is_shared else weight
