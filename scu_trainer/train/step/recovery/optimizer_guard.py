"""Running out of memory inside ``optimizer.step()`` neither ends the run nor leaves half-updated weights.

An optimizer writes weight after weight and allocates in between, so a failed step cannot simply be repeated. Two
remedies, which change no bit of the result:

    preallocate      before the first step: create the state, the largest allocation, while nothing can be lost
    OptimizerGuard   every step: update a few parameters at a time, after copying what each part may change; on
                     failure restore the copy, free memory, and try smaller parts, down to one parameter

Fused updates allocate nothing once their state exists; they run whole, without copies. Paged states are updated without
copies too, one parameter at a time. ``Tensor._version`` does not help here: fused and bitsandbytes kernels do not count
their writes.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from scu_trainer.errors import OutOfMemory
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.optimizer_parts import (
    Pair,
    ParameterGroupPart,
    SavedCounters,
    SavedPart,
    cut,
    is_paged,
)
from scu_trainer.train.step.recovery.optimizer_state import (
    inner_optimizer,
    step_module,
    step_without_hooks,
    steps_one_by_one,
)
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory
from scu_trainer.train.step.recovery.snapshot import replaced

logger = logging.getLogger(__name__)

# Modules with a fused step that consists of an addition to the counters and one kernel, neither of which allocates.
# After an overflow under a GradScaler, the addition is undone, also in place.
FUSED_IN_PLACE = frozenset({"torch.optim.adam", "torch.optim.adagrad", "torch.optim.sgd"})


class OptimizerGuard:
    """Makes each step of ``optimizer`` all or nothing per parameter, in smaller parts when memory is short.

    optimizer: a torch optimizer or accelerate's wrapper of one. Do not guard DeepSpeed's engine, which steps on its
    own, or sharded parameters (FSDP): a rank that repeats its step would wait for the others forever.
    named_parameters: names for the error message.
    part_bytes: bytes of weights that are updated together, default 8 MiB on the CPU and 64 MiB elsewhere.

    The guard is a pair of step hooks: it does the update itself with the optimizer's own arithmetic, then hides
    gradients or groups so that the stock call finds nothing to do. So it does not matter who calls (loop, GradScaler)
    or who has wrapped ``step`` (learning rate schedulers); other hooks run once per step and see all gradients;
    ``state_dict`` and pickling are unchanged. Steps with a closure pass through unguarded.

    recoveries: failures survived so far. half_stepped: the error just raised has left some parameters one step ahead;
    their weights must not be saved.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] = (),
        part_bytes: int | None = None,
    ) -> None:
        self.optimizer = inner_optimizer(optimizer)
        self.recoveries = 0
        self.half_stepped = False
        self._names = {parameter: name for name, parameter in named_parameters}
        self._part_bytes = part_bytes
        self._hooks: list[Any] = []
        self._whole = ParameterGroupPart(())
        self._is_hidden = False
        self._set_aside: list[dict[str, Any]] | None = None
        self._groups_before: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Guard every step from now on. For unknown optimizers this only logs a warning."""
        if not steps_one_by_one(self.optimizer):
            logger.warning(
                "%s (%s) is not known to update parameters one by one: running out of memory inside its step ends "
                "the run",
                type(self.optimizer).__name__,
                step_module(self.optimizer).partition(".")[0],
            )
        elif not self._hooks:
            self._hooks = [
                self.optimizer.register_step_pre_hook(self._update),
                self.optimizer.register_step_post_hook(self._finish),
            ]
            self._order_hooks()

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._show_all()  # left by an interrupted step

    def _order_hooks(self) -> None:
        # Other hooks work on gradients, so our hooks hide them last and show them first.
        before, after = self._hooks
        self.optimizer._optimizer_step_pre_hooks.move_to_end(before.id)
        self.optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)

    def _update(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        has_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
        is_last = next(reversed(optimizer._optimizer_step_pre_hooks)) == self._hooks[0].id
        if has_closure or not is_last:
            return
        if self._set_aside is not None:  # by an interrupted step
            self._show_all()
        groups = [[(p, p.grad) for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
        self._whole = ParameterGroupPart(tuple(pair for pairs in groups for pair in pairs))
        try:
            with torch.no_grad():
                self._step_parts(groups)
        except BaseException:
            self._show_all()
            raise

    def _finish(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._show_all()
        self._order_hooks()

    def _hide_all(self) -> None:
        self._is_hidden = True
        self._whole.hide()

    def _show_all(self) -> None:
        if self._is_hidden:
            self._whole.show()
        if self._set_aside is not None:
            self.optimizer.param_groups = self._set_aside
        self._whole, self._is_hidden, self._set_aside = ParameterGroupPart(()), False, None

    def _step_parts(self, groups: Sequence[list[Pair]]) -> None:
        self.half_stepped = False
        self._groups_before = [dict(group) for group in self.optimizer.param_groups]
        pending = deque(self._plan(groups))
        if not _are_groups(pending):
            self._hide_all()
        while pending:
            part = pending.popleft()
            if self._attempt(part):
                self.half_stepped = True
            else:
                self._hide_all()
                pending = deque(part for rest in [*self._smaller(part), *pending] for part in self._fitting(rest))
            self._reset_groups()
        self.half_stepped = False
        if not self._is_hidden:  # without groups the stock call finds nothing to do either, and sooner
            self._set_aside, self.optimizer.param_groups = self.optimizer.param_groups, []

    def _reset_groups(self) -> None:
        """Restore the groups: schedule-free optimizers count steps in them, so each part must begin with the same
        count. The stock call, which comes last and finds no gradient, advances it."""
        for group, before in zip(self.optimizer.param_groups, self._groups_before, strict=True):
            group.update(before)

    def _plan(self, groups: Sequence[list[Pair]]) -> list[ParameterGroupPart]:
        """Return the parts of an update of the optimizer's ``groups``. Parts with copies come first, and of these the
        largest parameters: if one cannot be updated, nothing has changed yet."""
        copied: list[Pair] = []
        paged: list[Pair] = []
        in_place: dict[Any, list[Pair]] = defaultdict(list)
        has_kernel = step_module(self.optimizer) in FUSED_IN_PLACE
        for index, (group, pairs) in enumerate(zip(self.optimizer.param_groups, groups, strict=True)):
            if not (has_kernel and group.get("fused", False)):
                for pair in pairs:
                    (paged if self._has_pages(pair[0]) else copied).append(pair)
                continue
            needs_state = group.get("momentum") != 0
            for parameter, gradient in pairs:
                if needs_state and not self.optimizer.state.get(parameter):
                    copied.append((parameter, gradient))
                else:  # updated by one kernel per group, device and type
                    in_place[index, parameter.device, parameter.dtype].append((parameter, gradient))
        whole = [
            ParameterGroupPart(tuple(pairs), copied=False, groups=(index,)) for (index, *_), pairs in in_place.items()
        ]
        return cut(copied, self._part_bytes) + [ParameterGroupPart((pair,), copied=False) for pair in paged] + whole

    def _has_pages(self, parameter: torch.Tensor) -> bool:
        """Return whether bitsandbytes pages the state: its kernel allocates nothing, and a copy would move it to the
        host."""
        return any(map(is_paged, self.optimizer.state.get(parameter, {}).values()))

    def _attempt(self, part: ParameterGroupPart) -> bool:
        """Update ``part`` and return True. If it runs out of memory, restore it, free memory and return False."""
        saved = None
        if self._is_hidden:
            part.show()
        every = self.optimizer.param_groups  # with only the groups of a part, the others are not searched
        groups = every if part.groups is None else [every[index] for index in part.groups]
        try:
            with CatchOutOfMemory(), replaced(self.optimizer, "param_groups", groups):
                saved = (SavedPart if part.copied else SavedCounters)(self.optimizer, part)
                step_without_hooks(self.optimizer)
                return True
        finally:
            if self._is_hidden:
                part.hide()
        if saved is not None:
            saved.restore()
            saved = None
        self._reset_groups()  # must come before anything below that may raise
        free_memory()
        return False

    def _fitting(self, part: ParameterGroupPart) -> list[ParameterGroupPart]:
        """Return ``part``, cut to the size that the last failure allows."""
        is_divisible = part.copied and len(part.pairs) > 1
        return cut(part.pairs, self._part_bytes) if is_divisible else [part]

    def _smaller(self, part: ParameterGroupPart) -> list[ParameterGroupPart]:
        """Return smaller parts to try instead. Raises OutOfMemory if there are none."""
        self.recoveries += 1
        logger.warning("out of memory in the optimizer step; retrying with smaller parts, which give the same result")
        if not part.copied:
            return cut(part.pairs, self._part_bytes)
        middle = len(part.pairs) // 2
        if middle:
            self._part_bytes = max(part.weight_bytes // 2, 1)  # the next step begins with the size that fits
            return [ParameterGroupPart(part.pairs[:middle]), ParameterGroupPart(part.pairs[middle:])]
        if not part.copy_to_host:
            return [replace(part, copy_to_host=True)]
        raise OutOfMemory(self._message(part.pairs[0][0]))

    def _message(self, parameter: torch.Tensor) -> str:
        name = self._names.get(parameter, "a parameter")
        size = f"{' x '.join(map(str, parameter.shape))}, {parameter.nbytes / 2**20:.3g} MiB"
        consequence = (
            "some other parameters have taken this step already: resume from the last checkpoint"
            if self.half_stepped
            else "no weight was changed"
        )
        return (
            f"the optimizer step does not fit in memory even for {name} ({size}) alone; {consequence}. Use optim: "
            "adamw_torch_fused, which needs no working memory, optim: adamw_8bit, tuning: lora, or a smaller model"
        )


def _are_groups(parts: Iterable[ParameterGroupPart]) -> bool:
    """Return whether each part is the whole update of one group: with only that group, nothing has to be hidden."""
    groups = [part.groups for part in parts]
    return bool(groups) and None not in groups and len(set(groups)) == len(groups)
