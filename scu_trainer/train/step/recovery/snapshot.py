"""What a micro-batch changes, so that a failed one can be undone: random states, buffers, gradients and counters."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import nn
from transformers import TrainerState

from scu_trainer.data.random_states import GENERATORS, RngStates, generator_restorer, restore_rng_states, rng_states
from scu_trainer.errors import OutOfMemory
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory

logger = logging.getLogger("scu_trainer")

Restorer = Callable[[], None]
Attributes = list[tuple[Any, dict[str, tuple[Any, Optional[Restorer]]], Optional[set[str]], Callable[[Any], bool]]]
"""(owner, its attributes with a function that restores their contents, its attribute names (None: keep new attributes),
which values of new attributes to delete)."""

PLAIN = (bool, int, float, str, type(None))
PLAIN_TYPES = frozenset(PLAIN)
CONTAINERS = (OrderedDict, dict, list, set, deque)
HOLDERS = (dict, list, set, deque, tuple)
MOST_ENTRIES = 10_000
"""Containers with more entries are not restored."""

OF_DATA = frozenset({"train_dataset", "eval_dataset", "data_collator", "callback_handler"})
"""Attributes of a trainer that a loss never writes to."""

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that torch itself keeps in a module: its mode, weights, buffers, hooks."""

MOST_BYTES = 64 * 2**20
"""The values of a tensor that is not a buffer, or of all tensors in a container, are restored only up to this size."""

COPIED_BYTES = 64 * 2**20
"""Buffers up to this total, the smallest first, are copied at every snapshot, whether they change or not. Larger ones
are copied in the first window, and afterwards only if they have been seen to change."""


class KeptBuffer(NamedTuple):
    """A buffer and its copy. ``tensor``: None if the name has no tensor. ``copy``: None if there is none."""

    module: nn.Module
    name: str
    tensor: Optional[torch.Tensor]
    copy: Optional[torch.Tensor]
    version: int
    is_large: bool


@dataclass(frozen=True)
class KeptBuffers:
    """``modules``: those that existed when the window began; buffers of modules registered later are not restored."""

    buffers: list[KeptBuffer]
    modules: list[nn.Module]


class ChangingBuffers:
    """Restores what a forward may change of a model's buffers: their values, the tensors themselves, and new names.

    Small buffers are always copied, because batch_norm's kernels and ``.data`` write without counting in ``_version``.
    Of the buffers beyond ``COPIED_BYTES`` only those that change are copied, as ``_version`` shows. A buffer that first
    changes in the window that has to be undone cannot be restored: ``restore`` raises an error that names it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_first = True
        self._modules: Optional[list[nn.Module]] = None
        self._changing: set[nn.Module] = set()
        self._stamps: dict[nn.Module, tuple] = {}
        self._large_copies: dict[tuple[nn.Module, str], tuple[tuple, Optional[torch.Tensor]]] = {}

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the model when the window began."""
        if self._modules is None:  # walking through adapters of a large model takes as long as copying its buffers
            self._modules = _all_modules(self._model)
        return self._modules

    def copies(self) -> KeptBuffers:
        """Return the current buffers, for ``restore``."""
        owners = [module for module in self.modules if module._buffers]
        named = [(module, name, buffer) for module in owners for name, buffer in module._buffers.items()]
        large = _large([buffer for _, _, buffer in named if buffer is not None])
        kept = []
        for module, name, buffer in named:
            is_large = id(buffer) in large
            copy = None
            if is_large:
                self._stamps.setdefault(module, _stamp(module))
                copy = self._copy_of_large(module, name, buffer)
            elif buffer is not None:
                copy = buffer.clone()
            version = 0 if buffer is None else _version(buffer)
            kept.append(KeptBuffer(module, name, buffer, copy, version, is_large))
        return KeptBuffers(kept, self.modules)

    def _copy_of_large(self, module: nn.Module, name: str, buffer: torch.Tensor) -> Optional[torch.Tensor]:
        """Return a copy, the same one while the module's buffers stay unchanged; None if they are taken as constant."""
        if not self._is_first and module not in self._changing:
            return None
        stamp, (known_stamp, copy) = _stamp(module), self._large_copies.get((module, name), (None, None))
        if stamp != known_stamp:
            self._large_copies.pop((module, name), None)  # drop the old copy first, so that there are never two
            copy = buffer.clone() if module in self._changing else _clone_if_it_fits(buffer)
            self._large_copies[module, name] = stamp, copy
        return copy

    def end_window(self) -> None:
        """Called after a successful step: from now on, copy the large buffers that it has changed."""
        self._changing |= {module for module, stamp in self._stamps.items() if stamp != _stamp(module)}
        constant = [module for module in self._stamps if module not in self._changing]
        if self._is_first and constant:
            self._log_constant(constant)
        for place in [place for place in self._large_copies if place[0] not in self._changing]:
            del self._large_copies[place]
        self._stamps, self._modules, self._is_first = {}, None, False

    def _log_constant(self, modules: Sequence[nn.Module]) -> None:
        names = [name for module in modules for name in _names(self._model, module)]
        logger.info(
            "%s are not copied: with the other buffers they exceed %d MiB, and they did not change in the first "
            "step. If one of them first changes in a step that has to be undone, the run ends with a message",
            ", ".join(names),
            COPIED_BYTES // 2**20,
        )

    @torch.no_grad()
    def restore(self, kept: KeptBuffers) -> None:
        """Restore the buffers. Raises OutOfMemory, after restoring the others, if one without a copy has changed."""
        touched = {kept_buffer.module for kept_buffer in kept.buffers if _is_touched(kept_buffer)}
        lost = []
        for kept_buffer in kept.buffers:
            if kept_buffer.copy is not None and (not kept_buffer.is_large or kept_buffer.module in touched):
                _fill(kept_buffer.tensor, kept_buffer.copy)
            elif (
                kept_buffer.copy is None
                and kept_buffer.tensor is not None
                and _version(kept_buffer.tensor) != kept_buffer.version
            ):
                lost.append(kept_buffer)
            kept_buffer.module._buffers[kept_buffer.name] = kept_buffer.tensor
        known = {(kept_buffer.module, kept_buffer.name) for kept_buffer in kept.buffers}
        for module in kept.modules:
            for name in [name for name in module._buffers if (module, name) not in known]:
                del module._buffers[name]
        if lost:
            self._changing |= {kept_buffer.module for kept_buffer in lost}
            raise OutOfMemory(self._message_on_lost(lost))

    def _message_on_lost(self, lost: Sequence[KeptBuffer]) -> str:
        names = [
            f"{name} ({kept_buffer.tensor.nbytes / 2**20:.3g} MiB)"
            for kept_buffer in lost
            for name in _names(self._model, kept_buffer.module)
            if name.rpartition(".")[2] == kept_buffer.name
        ]
        return (
            f"the buffer {', '.join(names)} first changed in a step that has to be undone, and only up to "
            f"{COPIED_BYTES // 2**20} MiB of buffers are copied before they change: the step cannot be repeated. "
            "Use resume_from_checkpoint: true, which resumes from the newest checkpoint and copies this buffer "
            "from its first step on; or lower max_batch_size, so that no step runs out of memory"
        )


def _all_modules(model: nn.Module) -> list[nn.Module]:
    """Return ``model.modules()`` in a tenth of the time: the original nests one generator per level."""
    found: dict[nn.Module, None] = {}
    waiting: list[Optional[nn.Module]] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            if children := module._modules:
                waiting.extend(reversed(children.values()))
    return list(found)


def _clone_if_it_fits(buffer: torch.Tensor) -> Optional[torch.Tensor]:
    """Return a copy, or None if memory runs out: in the first window, most large buffers are constant anyway."""
    with CatchOutOfMemory():
        return buffer.clone()
    return None


def _large(buffers: Sequence[torch.Tensor]) -> set[int]:
    """Return the ids of the buffers beyond ``COPIED_BYTES``, counted from the smallest buffer on."""
    sizes = {id(buffer): buffer.nbytes for buffer in buffers}
    if sum(sizes.values()) <= COPIED_BYTES:
        return set()
    total, large = 0, set()
    for identity, size_bytes in sorted(sizes.items(), key=lambda item: item[1]):
        total += size_bytes
        if total > COPIED_BYTES:
            large.add(identity)
    return large


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors have no version


def _stamp(module: nn.Module) -> tuple:
    return tuple((id(buffer), _version(buffer)) for buffer in module._buffers.values() if buffer is not None)


def _is_touched(one: KeptBuffer) -> bool:
    now = one.module._buffers.get(one.name)
    return now is not one.tensor or (now is not None and _version(now) != one.version)


def _fill(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    if tensor.shape == copy.shape and tensor.dtype == copy.dtype and tensor.device == copy.device:
        tensor.copy_(copy)
    else:  # resized, or moved by ``.data``
        tensor.data = copy.clone()


def _names(model: nn.Module, wanted: nn.Module) -> list[str]:
    name = next(name for name, module in model.named_modules() if module is wanted)
    return [f"{name}.{key}" if name else key for key, buffer in wanted._buffers.items() if buffer is not None]


def plain_attributes(modules: Sequence[nn.Module], owner: Any = None) -> Attributes:
    """Return the attributes of ``modules`` and ``owner`` that are plain values, arrays, tensors or containers.
    Containers of the state of a trainer, which hold its log, are left out."""
    seen: set[int] = set()  # a mask that all layers share is copied once
    attributes: Attributes = [(module, _plain_attributes(module, seen), None, is_small) for module in modules]
    if owner is not None:
        attributes.append((owner, _plain_attributes(owner, seen), set(vars(owner)), is_small))
    return attributes


def restore_attributes(attributes: Attributes, only: Callable[[Any], bool] = lambda _: True) -> None:
    """Restore ``attributes``, as often as needed. Other references to a container see its restored entries too.
    ``only``: restore an attribute only if its current value passes."""
    for one, known, names, is_deleted in attributes:
        now = vars(one)
        for name, (value, restore) in known.items():
            if not only(now.get(name)):
                continue
            if name not in now or now[name] is not value:
                now[name] = value
            if restore is not None:
                restore()
        for name in [] if names is None else now.keys() - names:  # created since, such as a new counter
            if is_deleted(now[name]) and only(now[name]):
                del now[name]


def _plain_attributes(one: Any, seen: set[int]) -> dict[str, tuple[Any, Optional[Restorer]]]:
    found: dict[str, tuple[Any, Optional[Restorer]]] = {}
    holders = () if isinstance(one, TrainerState) else HOLDERS
    for name, value in vars(one).items():
        if name in OF_TORCH or name in OF_DATA:
            continue
        if isinstance(value, PLAIN):
            found[name] = value, None
        elif is_array(value):
            found[name] = value, container_restorer(value, array_restorer, seen)
        elif isinstance(value, holders) and (held_bytes := bytes_held(value)) is not None:
            of_other = array_restorer if held_bytes <= MOST_BYTES else lambda _: None
            found[name] = value, container_restorer(value, of_other, seen)
    return found


def bytes_held(container: Any) -> Optional[int]:
    """Return the bytes of tensors and arrays within ``container``. None for more than MOST_ENTRIES entries, or ten
    times as many in all levels, and for a tensor of a graph: that is a loss, or what it came from, and not a state."""
    waiting, left, found = [container], 10 * MOST_ENTRIES, 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, HOLDERS):
            if len(one) > min(MOST_ENTRIES, left):
                return None
            left -= 1 + len(one)
            entries = one.values() if isinstance(one, dict) else one
            if not PLAIN_TYPES.issuperset(map(type, entries)):
                waiting += entries
        elif torch.is_tensor(one):
            if one.requires_grad:
                return None
            found += one.numel() * one.element_size()
        elif isinstance(one, np.ndarray):
            found += one.nbytes
    return found


def is_small(value: Any) -> bool:
    """Return whether ``value`` is a plain value, array, tensor or generator, or a container that can be restored."""
    if isinstance(value, HOLDERS):
        return bytes_held(value) is not None
    return isinstance(value, PLAIN) or is_array(value)


def container_restorer(value: Any, of_other: Callable[[Any], Optional[Restorer]], seen: set[int]) -> Optional[Restorer]:
    """Return a function that restores, as often as called, the entries of a container and of those within; None if
    there is nothing to do. ``of_other``: the same for other values. ``seen``: ids of containers and tensors already
    handled, because a container may hold itself."""
    kind: Any = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
    if kind is not None or torch.is_tensor(value):
        if id(value) in seen:
            return None
        seen.add(id(value))
    if kind is None:
        return of_other(value)
    if len(value) > MOST_ENTRIES:
        return None
    is_map = isinstance(value, dict)
    entries = dict(value) if is_map else kind(value)
    within = [restore for entry in _entries(value) if (restore := container_restorer(entry, of_other, seen))]

    def restore_entries() -> None:
        if len(value) != len(entries) or any(map(operator.is_not, _entries(value), _entries(entries))):
            kind.clear(value)  # model outputs disable their own method
            (kind.extend if kind in (list, deque) else kind.update)(value, entries)
        for restore in within:
            restore()

    return restore_entries


def array_restorer(value: Any) -> Optional[Restorer]:
    """Return a function that restores the values of an array, tensor or generator; None for everything else."""
    if type(value) is np.ndarray:
        is_kept = value.flags.writeable and value.nbytes <= MOST_BYTES
        return functools.partial(np.copyto, value, value.copy()) if is_kept else None
    if isinstance(value, GENERATORS):
        return generator_restorer(value)
    return functools.partial(refill, value, value.clone()) if is_state(value) else None


def is_array(value: Any) -> bool:
    return is_state(value) or type(value) is np.ndarray


def is_state(value: Any) -> bool:
    """Return whether ``value`` lasts from one loss to the next: a tensor (a queue, a moving mean), or a generator."""
    if type(value) is not torch.Tensor:
        return isinstance(value, GENERATORS)
    return not value.requires_grad and value.layout is torch.strided and value.nbytes <= MOST_BYTES


def refill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.shape != value.shape or tensor.dtype != value.dtype or tensor.device != value.device:
        tensor.data = value.clone()  # resized, or moved by ``.data``
    # An unchanged tensor may be shared, so leave it alone; a meta tensor has no values.
    elif not value.is_meta and not torch.equal(tensor, value):
        # Through ``data``, because a later backward may need this tensor with its earlier values.
        tensor.data.copy_(value)


def _entries(container: Any) -> Iterable[Any]:
    return (*container, *container.values()) if isinstance(container, dict) else container


class WindowSnapshot:
    """The random states, buffers, gradients and counters before a micro-batch. ``parameters``: the trainable ones.
    ``counting``: modules and their trainer, whose ``plain_attributes`` count or collect while a loss is computed."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        buffers: ChangingBuffers,
        parameters: Sequence[nn.Parameter],
        counting: tuple[Sequence[nn.Module], Any] = ((), None),
    ) -> None:
        self.buffers, self.parameters = buffers, parameters
        self.gradients, self.attributes = gradient_versions(parameters), plain_attributes(*counting)
        self.rng, self.copies = generators(devices), buffers.copies()

    @property
    def is_whole(self) -> bool:
        """Whether every buffer that the micro-batch may change could be restored."""
        return all(one.copy is not None or one.tensor is None for one in self.copies.buffers)

    def restore_surroundings(self) -> None:
        """Restore random states, attributes and buffers, but no gradients. Raises like ``ChangingBuffers.restore``."""
        restore_rng_states(self.rng)
        restore_attributes(self.attributes)
        self.buffers.restore(self.copies)

    def gradients_touched(self) -> bool:
        """Return whether a backward has written to any gradient since."""
        return self.gradients != gradient_versions(self.parameters)


def generators(devices: Iterable[torch.device] = ()) -> RngStates:
    """Return the current random states of torch (CPU and ``devices``), numpy and Python."""
    return rng_states() + random_states_of_devices(devices)


def random_states_of_devices(devices: Iterable[torch.device]) -> RngStates:
    """Return the random states of the ``devices`` that are accelerators."""
    modules = [(getattr(torch, one.type), one) for one in devices if one.type not in ("cpu", "meta")]
    return [(functools.partial(m.set_rng_state, device=one), m.get_rng_state(one)) for m, one in modules]


def gradient_versions(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Return a value per parameter that changes when its gradient does. Reads no gradient and waits for no device."""
    return [(0, 0) if p.grad is None else (id(p.grad), p.grad._version) for p in parameters]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``value``; afterwards it is what it was, even if the class defined it."""
    own = vars(owner)
    before, had_one = own.get(name), name in own
    own[name] = value
    try:
        yield
    finally:
        if had_one:
            own[name] = before
        else:
            del own[name]
