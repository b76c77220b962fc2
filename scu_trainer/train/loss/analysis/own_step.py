"""A ``training_step`` of somebody's own: whether it is the stock one, with things around it that no gradient feels.

Trials ask ``compute_loss`` alone. What a step does beside it they cannot see: a second backward, rows that are mixed, a
loss that is added. It is watched instead, the first time on whole batches, and from then on in every micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Optional

import torch
from transformers import Trainer

from scu_trainer.train.loss.analysis.exchange import exchange_in
from scu_trainer.train.loss.analysis.frozen_weights import LOSS_WRITES, WRITES, WrittenWeights, frozen_weights
from scu_trainer.train.loss.analysis.no_trace import host_states, rng_state
from scu_trainer.train.loss.rows.model_loss import (
    PUBLIC,
    Measured,
    comes_from,
    defined_between,
    has_sharded_weights,
    is_public,
    step_of_batches,
)
from scu_trainer.train.step.recovery.optimizer_parts import alike
from scu_trainer.train.step.recovery.optimizer_state import inner_optimizer
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory
from scu_trainer.train.step.recovery.snapshot import gradient_versions, replaced

logger = logging.getLogger("scu_trainer")

LOOKS = 3
"""Windows with cut batches in which counters are looked for: to walk through attributes takes time in small steps."""

Counts = dict[tuple[str, str], int]


class OwnStep:
    """``owner``: the class that defines it, None for transformers' and TRL's. ``is_seen``: it has been watched.
    ``deviation``: from the stock step, as the rest of a sentence. ``exchange``: as of ``exchange_in``. ``per_batch``:
    why batches run whole in TRL's step, which is known. ``hooked``: which weight has a hook that acts in backward."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        owner = defined_between(trainer, "training_step")
        self.owner = None if owner is None or is_public(owner) else owner.__name__
        self.is_seen = self.owner is None
        self.deviation: Optional[str] = None
        self.hooked: Optional[str] = None
        self.exchange = exchange_in(trainer)
        of_trl = step_of_batches(trainer)
        self.per_batch = of_trl and f"training_step of {of_trl} draws or generates what it trains on once per batch"
        self._frozen: list[torch.Tensor] = []
        self._held: Optional[list[int]] = None

    @property
    def is_stock(self) -> bool:
        """As far as gradients go, and as far as that is known."""
        return self.is_seen and self.deviation is None and self.exchange is None and self.hooked is None

    @property
    def mixes(self) -> Optional[str]:
        """Why no batch may be cut, whatever is known of its loss."""
        if self.is_stock:
            return None
        if self.exchange is not None:
            return self.exchange
        if self.hooked is not None:
            return self.hooked
        return f"training_step of {self.owner} {self.deviation or 'is observed during its first step'}"

    def look_for_hooks(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Such a hook may step an optimizer and clear the gradient: that of a micro-batch is not that of the batch, and
        what it has changed when memory runs out is not known. Launchers have such hooks themselves."""
        trainer, self.hooked = self._trainer, None
        hooked = [p for p in parameters if p._post_accumulate_grad_hooks]
        if hooked and not (trainer.is_deepspeed_enabled or has_sharded_weights(trainer.model)):
            self.hooked = f"a hook on {name_of(hooked[0], trainer.model)} acts within each backward pass"

    @contextlib.contextmanager
    def unwritten(self, stop: Callable[[str, str], NoReturn], writes: bool) -> Iterator[None]:
        """Around a micro-batch: ``stop(why, what the allocation said)`` where it ran out of memory after its loss had
        moved a teacher, or stepped an optimizer of its own: to run it again would do so twice. ``writes``: the loss was
        seen to, so that each operation is looked at, as ``.data`` writes without counting."""
        if not self.is_stock:  # nothing runs again
            yield
            return
        self._find_frozen()
        versions = [weight._version for weight in self._frozen]
        written = WrittenWeights(self._frozen, keeps_values=False) if writes else None
        try:
            with written or contextlib.nullcontext():
                yield
        except (RuntimeError, MemoryError, OSError) as error:
            has_moved = versions != [weight._version for weight in self._frozen]
            if is_out_of_memory(error) and (has_moved or (written is not None and written.are_written)):
                stop(LOSS_WRITES, str(error).partition("\n")[0])
            raise

    @contextlib.contextmanager
    def watched(self, inputs: Any, num_items: Any, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Around the step with ``inputs`` and ``num_items``, whose gradients are those of ``parameters``."""
        if self.deviation is not None or self.exchange is not None:
            yield
            return
        trainer, watch = self._trainer, _Watch(inputs, num_items, parameters, self._trainer, thorough=not self.is_seen)
        self._find_frozen()
        written = WrittenWeights(self._frozen, keeps_values=False)  # a step that stands: nothing is put back
        with (
            contextlib.nullcontext() if self.is_seen else watch.for_clearing(),
            written if self._frozen and not self.is_seen else contextlib.nullcontext(),
            replaced(trainer, "_prepare_inputs", watch.preparing(trainer._prepare_inputs)),
            replaced(trainer, "compute_loss", watch.asking(trainer.compute_loss)),
            replaced(trainer.accelerator, "backward", watch.going_back(trainer.accelerator.backward)),
        ):
            yield
        self.is_seen, self.deviation = True, watch.deviation() or (WRITES if written.are_written else None)

    def _find_frozen(self) -> None:
        """After the first step, which may make a teacher, only if the trainer holds other modules: it takes time."""
        held = [id(value) for value in vars(self._trainer).values() if isinstance(value, torch.nn.Module)]
        if held != self._held:
            self._frozen = frozen_weights(self._trainer.model, self._trainer)
            self._held = held if self.is_seen else None


class _Watch:
    """What happens in one step that is given ``inputs`` and ``num_items``. ``thorough``: values of weights and
    gradients are looked at, too, which waits for the device: ``.data`` writes without a trace."""

    def __init__(
        self, inputs: Any, num_items: Any, parameters: Sequence[torch.nn.Parameter], trainer: Trainer, thorough: bool
    ) -> None:
        self._given, self._num_items = _seen(inputs), num_items
        self._parameters, self._trainer, self._is_thorough = parameters, trainer, thorough
        self._begun = self._state()
        self._asked: list[tuple[Any, Any, Any]] = []
        """(what the batch was, its count, node of the loss)"""
        self._back: list[tuple[bool, Any, Any]] = []
        """(whether it was that loss, weights and gradients before and after)"""
        self._random = _random_states(trainer.model) if thorough else None
        self._draws = self._clears = False

    def _state(self) -> list[Any]:
        """What changes when gradients do, or weights, if these are not gathered for each forward."""
        found: list[Any] = [gradient_versions(self._parameters)]
        whole = () if has_sharded_weights(self._trainer.model) else self._parameters
        found.append([(p._version, len(p._backward_hooks or ())) for p in whole])
        if self._is_thorough:
            found.append(_norms([p.detach() for p in whole]))
            found.append(_norms([p.grad for p in self._parameters if p.grad is not None]))
        return found

    def preparing(self, prepare):
        def prepared(inputs):
            self._look_for_draws()
            is_given = self._given == _seen(inputs)
            found = prepare(inputs)
            self._random = None if self._random is None else _random_states(self._trainer.model)
            if is_given:  # other devices and types, and whatever the trainer does to any batch
                self._given = _seen(found)
            return found

        return prepared

    def asking(self, compute_loss):
        def asked(model, inputs, return_outputs=False, num_items_in_batch=None):
            self._look_for_draws()
            self._random = None
            seen = _seen(inputs)
            found = compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
            loss = found[0] if isinstance(found, tuple) else found
            self._asked.append((seen, num_items_in_batch, loss.grad_fn))
            return found

        return Measured(compute_loss, asked)

    def going_back(self, backward):
        def back(loss, **kwargs):
            before, clears = self._state(), self._clears
            is_asked = all(self._is_scaled_as_stock(loss.grad_fn, asked) for _, _, asked in self._asked)
            backward(loss, **kwargs)
            self._clears = clears  # DeepSpeed's engine steps in it, and clears then
            self._back.append((is_asked, before, self._state()))

        return back

    @contextlib.contextmanager
    def for_clearing(self) -> Iterator[None]:
        """A first step has no gradients yet whose loss would show; those of the next one's micro-batches would go."""
        trainer = self._trainer
        owners = {id(one): one for one in (trainer.model, trainer.model_wrapped, trainer.optimizer)}
        owners[0] = inner_optimizer(trainer.optimizer)
        with contextlib.ExitStack() as stack:
            for one in owners.values():
                stack.enter_context(replaced(one, "zero_grad", self._clearing(one.zero_grad)))
            yield

    def _clearing(self, zero_grad):
        @functools.wraps(zero_grad)  # accelerate asks which arguments it takes
        def cleared(*given, **named):
            self._clears = True
            return zero_grad(*given, **named)

        return cleared

    def _look_for_draws(self) -> None:
        """What is drawn until the loss is asked is drawn once per batch; in it, or as a batch is prepared, for rows."""
        if self._random is not None:
            self._draws |= self._random != _random_states(self._trainer.model)

    def deviation(self) -> Optional[str]:
        if len(self._asked) != 1 or len(self._back) != 1:
            return f"runs compute_loss {len(self._asked)} × and backward {len(self._back)} ×"
        (seen, num_items, _), (is_asked, before, after) = self._asked[0], self._back[0]
        if seen != self._given:
            return "changes the batch before its loss is computed"
        if num_items is not self._num_items:
            return "does not pass num_items_in_batch to compute_loss"
        if not is_asked:
            return "runs backward on another loss than that of compute_loss"
        if self._clears or before != self._begun or after != self._state():
            return "changes weights or gradients outside the backward pass of its loss"
        return "draws random numbers once per batch" if self._draws else None

    def _is_scaled_as_stock(self, node: Any, loss: Any) -> bool:
        """Whether ``node`` is that of ``loss``, or of it divided by the accumulation steps. Reads from no device."""
        if node is loss:
            return True
        if type(node).__name__ != "DivBackward0" or node.next_functions[0][0] is not loss:
            return False
        divisor = node._saved_other
        return divisor.device.type == "cpu" and divisor.tolist() == self._trainer.current_gradient_accumulation_steps


class CallCounters:
    """What goes up by one per call in ``holders``: cut batches make other numbers of calls than the stock loop."""

    def __init__(self, holders: Collection[Any]) -> None:
        self._holders = [one for one in holders if _own_name(one)]
        self._left = LOOKS

    def counts(self) -> Counts:
        """As they are now; none where nobody looks any more."""
        if not self._left:
            return {}
        return {(_own_name(one), name): value for one in self._holders for name, value in _numbers_of(one)}

    def tell(self, before: Counts, micro_batches: int, batches: int, rows: int) -> None:
        """Of what has counted ``micro_batches`` since ``before``, where the stock loop runs another number of
        ``batches``. Of one row each, they cannot be told from ``rows``, which the stock loop counts as well."""
        now = self.counts()
        self._left -= 1
        found = [key for key, count in before.items() if now.get(key) == count + micro_batches]
        if found:
            self._left = 0
            names = ", ".join(f"{name} of {owner}" for owner, name in found)
            what = "micro-batches or rows, which are as many" if micro_batches == rows else "micro-batches"
            logger.warning(
                "%s counts %s (%d in a step)%s, where the stock loop counts batches (%d): a loss that depends on it, "
                "such as one with a weight that grows, changes at other steps; use the trainer's state.global_step",
                names, what, micro_batches, "; if it counts calls" if micro_batches == rows else "", batches,
            )  # fmt: skip


def _numbers_of(one: Any) -> Iterator[tuple[str, float]]:
    """Whole numbers among its attributes, and its buffers of one number."""
    yield from ((name, value) for name, value in vars(one).items() if type(value) is int)
    for name, buffer in vars(one).get("_buffers", {}).items():
        if buffer is not None and buffer.numel() == 1 and not buffer.is_meta:
            yield name, buffer.item()


def _own_name(one: Any) -> str:
    """Of the class that is somebody's own; empty where there is none."""
    return next((kind.__name__ for kind in type(one).__mro__ if not comes_from(kind, *PUBLIC)), "")


def has_own_hook(weight: torch.nn.Parameter) -> bool:
    """Whether a hook on it is code of somebody's own. Those of public packages (projections of adapters, exchanges of
    launchers) are linear."""
    hooks = {**(weight._backward_hooks or {}), **(weight._post_accumulate_grad_hooks or {})}
    return any(not comes_from(getattr(hook, "func", hook), *PUBLIC) for hook in hooks.values())  # of a partial


def name_of(weight: torch.nn.Parameter, model: torch.nn.Module) -> str:
    return next((name for name, other in model.named_parameters() if other is weight), "a weight")


def _seen(inputs: Any) -> Any:
    """What tells whether somebody has changed a batch: its tensors, and how often they were written."""
    if not isinstance(inputs, Mapping):
        return None  # what a list holds shows when it is prepared
    return {
        name: (id(value), value._version) if torch.is_tensor(value) and not value.is_inference() else None
        for name, value in inputs.items()
    }


def _random_states(model: torch.nn.Module) -> tuple:
    """Those of torch, on every device, of numpy and of Python; equal where nothing was drawn."""
    return [state.tolist() for state in rng_state(model)], host_states()


def _norms(tensors: Sequence[torch.Tensor]) -> list[str]:
    """As text, in which NaN equals NaN."""
    known = (t for t in tensors if not t.is_meta and t.is_floating_point() and t.layout is torch.strided)
    return [str(torch.stack(torch._foreach_norm(same_kind)).tolist()) for same_kind in alike(known)]
