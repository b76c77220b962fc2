"""Find out whether a user's own ``training_step`` computes the same gradients as the stock one.

Trials only call ``compute_loss``. They do not see what else a step does: a second backward, mixed rows, an added loss.
So the step is watched: the first time on whole batches, and from then on in every micro-batch.
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
    ReplacedFunction,
    comes_from,
    defined_between,
    has_sharded_weights,
    is_public,
    trl_step_per_batch,
)
from scu_trainer.train.step.recovery.optimizer_parts import by_device_and_dtype
from scu_trainer.train.step.recovery.optimizer_state import inner_optimizer
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory
from scu_trainer.train.step.recovery.snapshot import gradient_versions, replaced

logger = logging.getLogger("scu_trainer")

MOST_SEARCHES = 3
"""Number of windows with split batches in which counters are searched; walking through attributes takes time."""

Counts = dict[tuple[str, str], int]


class OwnStep:
    """What is known about a trainer's ``training_step``.

    ``owner``: the class that defines it; None for transformers' and TRL's. ``is_seen``: whether it has been watched.
    ``deviation``: how it differs from the stock step, as the end of a sentence. ``exchange``: see ``exchange_in``.
    ``per_batch``: why batches run whole in a step of TRL. ``hooked``: what ``find_hooks`` found, as a phrase.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        owner = defined_between(trainer, "training_step")
        self.owner = None if owner is None or is_public(owner) else owner.__name__
        self.is_seen = self.owner is None
        self.deviation: Optional[str] = None
        self.hooked: Optional[str] = None
        self.exchange = exchange_in(trainer)
        trl_class = trl_step_per_batch(trainer)
        self.per_batch = (
            trl_class and f"training_step of {trl_class} draws or generates what it trains on once per batch"
        )
        self._frozen: list[torch.Tensor] = []
        self._held_modules: Optional[list[int]] = None

    @property
    def is_stock(self) -> bool:
        """Whether its gradients are those of the stock step, as far as is known."""
        return self.is_seen and self.deviation is None and self.exchange is None and self.hooked is None

    @property
    def mixes(self) -> Optional[str]:
        """Why no batch may be split, whatever is known about its loss; None if the step does not forbid it."""
        if self.is_stock:
            return None
        if self.exchange is not None:
            return self.exchange
        if self.hooked is not None:
            return self.hooked
        return f"training_step of {self.owner} {self.deviation or 'is observed during its first step'}"

    def find_hooks(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Find hooks on ``parameters`` that act when a gradient has been accumulated.

        Such a hook may step an optimizer and clear the gradient, so the gradient of a micro-batch is not part of that
        of the batch, and it is unknown what changed before memory ran out. Hooks of launchers are ignored.
        """
        trainer, self.hooked = self._trainer, None
        hooked = [p for p in parameters if p._post_accumulate_grad_hooks]
        if hooked and not (trainer.is_deepspeed_enabled or has_sharded_weights(trainer.model)):
            self.hooked = f"a hook on {name_of(hooked[0], trainer.model)} acts within each backward pass"

    @contextlib.contextmanager
    def guard_frozen_weights(self, stop: Callable[[str, str], NoReturn], writes: bool) -> Iterator[None]:
        """Call ``stop(reason, allocation error)`` if a micro-batch runs out of memory after it changed frozen weights.

        For instance, its loss moved a teacher or stepped an optimizer of its own; running it again would do so twice.
        ``writes``: whether the loss was seen to do so; then each operation is checked, because ``.data`` writes without
        increasing the version counter.
        """
        if not self.is_stock:  # then no batch runs again
            yield
            return
        self._update_frozen_weights()
        versions = [weight._version for weight in self._frozen]
        written = WrittenWeights(self._frozen, keeps_values=False) if writes else None
        try:
            with written or contextlib.nullcontext():
                yield
        except (RuntimeError, MemoryError, OSError) as error:
            have_changed = versions != [weight._version for weight in self._frozen]
            if is_out_of_memory(error) and (have_changed or (written is not None and written.are_written)):
                stop(LOSS_WRITES, str(error).partition("\n")[0])
            raise

    @contextlib.contextmanager
    def watch_step_with(self, inputs: Any, num_items: Any, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Watch a step with ``inputs`` and ``num_items`` that adds to the gradients of ``parameters``."""
        if self.deviation is not None or self.exchange is not None:
            yield
            return
        trainer = self._trainer
        watch = _StepWatch(inputs, num_items, parameters, trainer, thorough=not self.is_seen)
        self._update_frozen_weights()
        written = WrittenWeights(self._frozen, keeps_values=False)  # this step is real, so nothing is restored
        with (
            contextlib.nullcontext() if self.is_seen else watch.watch_zero_grad(),
            written if self._frozen and not self.is_seen else contextlib.nullcontext(),
            replaced(trainer, "_prepare_inputs", watch.wrap_prepare_inputs(trainer._prepare_inputs)),
            replaced(trainer, "compute_loss", watch.wrap_compute_loss(trainer.compute_loss)),
            replaced(trainer.accelerator, "backward", watch.wrap_backward(trainer.accelerator.backward)),
        ):
            yield
        self.is_seen, self.deviation = True, watch.deviation() or (WRITES if written.are_written else None)

    def _update_frozen_weights(self) -> None:
        """Find frozen weights. It takes time, so after the first step only if the trainer holds other modules."""
        held = [id(value) for value in vars(self._trainer).values() if isinstance(value, torch.nn.Module)]
        if held != self._held_modules:
            self._frozen = frozen_weights(self._trainer.model, self._trainer)
            self._held_modules = held if self.is_seen else None


class _StepWatch:
    """Records what happens in one step with ``inputs`` and ``num_items``. ``thorough``: whether to check the values of
    weights and gradients, too, because ``.data`` writes without a trace; this waits for the device."""

    def __init__(
        self, inputs: Any, num_items: Any, parameters: Sequence[torch.nn.Parameter], trainer: Trainer, thorough: bool
    ) -> None:
        self._expected_inputs, self._num_items = _tensor_versions(inputs), num_items
        self._parameters, self._trainer, self._is_thorough = parameters, trainer, thorough
        self._initial_state = self._state()
        self._loss_calls: list[tuple[Any, Any, Any]] = []
        """(the batch, its number of items, autograd node of the loss) of each compute_loss"""
        self._backwards: list[tuple[bool, Any, Any]] = []
        """(whether it was the loss of compute_loss, weights and gradients before and after) of each backward"""
        self._random = _random_states(trainer.model) if thorough else None
        self._draws = self._clears = False

    def _state(self) -> list[Any]:
        """Return a state that changes when gradients change, or weights unless they are gathered for each forward."""
        found: list[Any] = [gradient_versions(self._parameters)]
        whole = () if has_sharded_weights(self._trainer.model) else self._parameters
        found.append([(p._version, len(p._backward_hooks or ())) for p in whole])
        if self._is_thorough:
            found.append(_norms([p.detach() for p in whole]))
            found.append(_norms([p.grad for p in self._parameters if p.grad is not None]))
        return found

    def wrap_prepare_inputs(self, prepare):
        """Wrap ``_prepare_inputs`` to follow the batch to its copy on the device."""

        def prepare_and_record(inputs):
            self._look_for_draws()
            is_given = self._expected_inputs == _tensor_versions(inputs)
            found = prepare(inputs)
            self._random = None if self._random is None else _random_states(self._trainer.model)
            if is_given:  # moved to another device or dtype, or changed as the trainer changes every batch
                self._expected_inputs = _tensor_versions(found)
            return found

        return prepare_and_record

    def wrap_compute_loss(self, compute_loss):
        def recorded(model, inputs, return_outputs=False, num_items_in_batch=None):
            self._look_for_draws()
            self._random = None
            seen = _tensor_versions(inputs)
            found = compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
            loss = found[0] if isinstance(found, tuple) else found
            self._loss_calls.append((seen, num_items_in_batch, loss.grad_fn))
            return found

        return ReplacedFunction(compute_loss, recorded)

    def wrap_backward(self, backward):
        def watched_backward(loss, **kwargs):
            before, clears = self._state(), self._clears
            is_recorded_loss = all(
                self._is_scaled_as_stock(loss.grad_fn, recorded) for _, _, recorded in self._loss_calls
            )
            backward(loss, **kwargs)
            self._clears = clears  # DeepSpeed's engine steps during backward and then clears gradients
            self._backwards.append((is_recorded_loss, before, self._state()))

        return watched_backward

    @contextlib.contextmanager
    def watch_zero_grad(self) -> Iterator[None]:
        """Watch ``zero_grad``: the first step has no gradients that it could clear, but later micro-batches have."""
        trainer = self._trainer
        owners = {id(holder): holder for holder in (trainer.model, trainer.model_wrapped, trainer.optimizer)}
        owners[0] = inner_optimizer(trainer.optimizer)
        with contextlib.ExitStack() as stack:
            for holder in owners.values():
                stack.enter_context(replaced(holder, "zero_grad", self._wrap_zero_grad(holder.zero_grad)))
            yield

    def _wrap_zero_grad(self, zero_grad):
        @functools.wraps(zero_grad)  # accelerate inspects its arguments
        def zero_grad_and_record(*given, **named):
            self._clears = True
            return zero_grad(*given, **named)

        return zero_grad_and_record

    def _look_for_draws(self) -> None:
        """Detect random numbers drawn once per batch, that is, neither while the batch is prepared nor in the loss."""
        if self._random is not None:
            self._draws |= self._random != _random_states(self._trainer.model)

    def deviation(self) -> Optional[str]:
        """Return how the step differs from the stock one, as the end of a sentence; None if it does not."""
        if len(self._loss_calls) != 1 or len(self._backwards) != 1:
            return f"runs compute_loss {len(self._loss_calls)} × and backward {len(self._backwards)} ×"
        (seen, num_items, _), (is_recorded_loss, before, after) = self._loss_calls[0], self._backwards[0]
        if seen != self._expected_inputs:
            return "changes the batch before its loss is computed"
        if num_items is not self._num_items:
            return "does not pass num_items_in_batch to compute_loss"
        if not is_recorded_loss:
            return "runs backward on another loss than that of compute_loss"
        if self._clears or before != self._initial_state or after != self._state():
            return "changes weights or gradients outside the backward pass of its loss"
        return "draws random numbers once per batch" if self._draws else None

    def _is_scaled_as_stock(self, node: Any, loss: Any) -> bool:
        """Return whether ``node`` is ``loss`` or ``loss`` divided by the accumulation steps. Reads from no device."""
        if node is loss:
            return True
        if type(node).__name__ != "DivBackward0" or node.next_functions[0][0] is not loss:
            return False
        divisor = node._saved_other
        return divisor.device.type == "cpu" and divisor.tolist() == self._trainer.current_gradient_accumulation_steps


class CallCounters:
    """Find numbers in ``holders`` that go up by one per call, and would count differently when batches are split."""

    def __init__(self, holders: Collection[Any]) -> None:
        self._holders = [holder for holder in holders if _user_class(holder)]
        self._left = MOST_SEARCHES

    def counts(self) -> Counts:
        """Return all whole numbers as they are now; empty when the search is over."""
        if not self._left:
            return {}
        return {
            (_user_class(holder), name): value for holder in self._holders for name, value in _whole_numbers(holder)
        }

    def warn_about_counts(self, before: Counts, micro_batches: int, batches: int, rows: int) -> None:
        """Warn about numbers that counted ``micro_batches`` since ``before`` and not ``batches``, as in the stock loop.
        If each micro-batch has one row, it may count ``rows``, which is the same in the stock loop."""
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


def _whole_numbers(holder: Any) -> Iterator[tuple[str, float]]:
    """Yield whole numbers among the attributes of an object, and its buffers with one number."""
    yield from ((name, value) for name, value in vars(holder).items() if type(value) is int)
    for name, buffer in vars(holder).get("_buffers", {}).items():
        if buffer is not None and buffer.numel() == 1 and not buffer.is_meta:
            yield name, buffer.item()


def _user_class(holder: Any) -> str:
    """Return the name of the user's own class in the object's class hierarchy; empty if there is none."""
    return next((kind.__name__ for kind in type(holder).__mro__ if not comes_from(kind, *PUBLIC)), "")


def has_user_hook(weight: torch.nn.Parameter) -> bool:
    """Return whether a hook on ``weight`` is user code. Hooks of public packages (adapters, launchers) are linear."""
    hooks = {**(weight._backward_hooks or {}), **(weight._post_accumulate_grad_hooks or {})}
    return any(not comes_from(getattr(hook, "func", hook), *PUBLIC) for hook in hooks.values())  # of a partial


def name_of(weight: torch.nn.Parameter, model: torch.nn.Module) -> str:
    return next((name for name, other in model.named_parameters() if other is weight), "a weight")


def _tensor_versions(inputs: Any) -> Any:
    """Return a value that changes if the batch changes: its tensors and their version counters."""
    if not isinstance(inputs, Mapping):
        return None  # changes in a list show when it is prepared
    return {
        name: (id(value), value._version) if torch.is_tensor(value) and not value.is_inference() else None
        for name, value in inputs.items()
    }


def _random_states(model: torch.nn.Module) -> tuple:
    """Return the random states of torch on all devices, of numpy and of Python; equal if nothing was drawn."""
    return [state.tolist() for state in rng_state(model)], host_states()


def _norms(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the norms as text, in which NaN equals NaN."""
    known = (t for t in tensors if not t.is_meta and t.is_floating_point() and t.layout is torch.strided)
    return [str(torch.stack(torch._foreach_norm(same_kind)).tolist()) for same_kind in by_device_and_dtype(known)]
