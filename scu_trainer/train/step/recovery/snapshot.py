"""What a micro-batch changes, so that a failed one can be taken back: RNG, buffers, gradients, and own counters."""

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

from scu_trainer.data.random_states import GENERATORS, States, of_generator, put_back, states
from scu_trainer.errors import OutOfMemory
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory

logger = logging.getLogger("scu_trainer")

PutBack = Callable[[], None]
Attributes = list[tuple[Any, dict[str, tuple[Any, Optional[PutBack]]], Optional[set[str]], Callable[[Any], bool]]]
"""Owners, attributes of theirs with what puts contents back, the names that they have (None: new ones stay), and which
values of new names go."""

PLAIN = (bool, int, float, str, type(None))
PLAIN_TYPES = frozenset(PLAIN)
CONTAINERS = (OrderedDict, dict, list, set, deque)
HOLDERS = (dict, list, set, deque, tuple)
MOST_ENTRIES = 10_000
"""Entries of a container up to which it is put back."""

OF_DATA = frozenset({"train_dataset", "eval_dataset", "data_collator", "callback_handler"})
"""Attributes of a trainer that no loss writes to."""

OF_TORCH = frozenset(vars(nn.Module()))
"""What torch itself keeps of a module: its mode, weights, buffers, hooks."""

MOST_BYTES = 64 * 2**20
"""Of a tensor that is no buffer, or of all in one container, put back where they are written to."""

COPIED_BYTES = 64 * 2**20
"""Buffers that are copied at every snapshot, the smallest first: nobody has to tell whether they change. Larger ones
are copied in the first window, and afterwards if they have been seen to change."""


class KeptBuffer(NamedTuple):
    """``tensor``: None where a name was registered without one. ``copy``: None where there is no copy of it."""

    module: nn.Module
    name: str
    tensor: Optional[torch.Tensor]
    copy: Optional[torch.Tensor]
    version: int
    is_large: bool


@dataclass(frozen=True)
class KeptBuffers:
    """``modules``: those that were there when the window began; what later ones register is their own affair."""

    buffers: list[KeptBuffer]
    modules: list[nn.Module]


class ChangingBuffers:
    """What a forward may change of a model's buffers, put back: values, other tensors in their place, new names.

    Small buffers are copied every time: batch_norm's kernels and ``.data`` write without counting in ``_version``. Of
    those beyond ``COPIED_BYTES`` only the ones that change are, as ``_version`` shows. One that first changes in the
    window that has to be taken back cannot be: ``restore`` says so by name.
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
        """Those of the model, as they were when the window began."""
        if self._modules is None:  # walking through adapters of a large model takes as long as copying its buffers
            self._modules = _all_modules(self._model)
        return self._modules

    def copies(self) -> KeptBuffers:
        """The buffers as they are now, for ``restore``."""
        owners = [module for module in self.modules if module._buffers]
        found = [(module, name, buffer) for module in owners for name, buffer in module._buffers.items()]
        large = _large([buffer for _, _, buffer in found if buffer is not None])
        kept = []
        for module, name, buffer in found:
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
        """One copy for as long as the module's buffers stay as they are; None where it is taken for constant."""
        if not self._is_first and module not in self._changing:
            return None
        stamp, (known_stamp, copy) = _stamp(module), self._large_copies.get((module, name), (None, None))
        if stamp != known_stamp:
            self._large_copies.pop((module, name), None)  # before the new one: not both at once
            copy = buffer.clone() if module in self._changing else _clone_if_it_fits(buffer)
            self._large_copies[module, name] = stamp, copy
        return copy

    def end_window(self) -> None:
        """After a step that stands: large buffers that it has changed are copied from now on."""
        self._changing |= {module for module, stamp in self._stamps.items() if stamp != _stamp(module)}
        constant = [module for module in self._stamps if module not in self._changing]
        if self._is_first and constant:
            self._say_constant(constant)
        for place in [place for place in self._large_copies if place[0] not in self._changing]:
            del self._large_copies[place]
        self._stamps, self._modules, self._is_first = {}, None, False

    def _say_constant(self, modules: Sequence[nn.Module]) -> None:
        names = [name for module in modules for name in _names(self._model, module)]
        logger.info(
            "no copies are kept of %s: with the others they exceed %d MiB, and they did not change in the first "
            "step. If one of them first changes in a step that has to be undone, the run ends with a message",
            ", ".join(names),
            COPIED_BYTES // 2**20,
        )

    @torch.no_grad()
    def restore(self, kept: KeptBuffers) -> None:
        """Raises OutOfMemory, with all others put back, where a buffer has changed of which there is no copy."""
        touched = {one.module for one in kept.buffers if _is_touched(one)}
        lost = []
        for one in kept.buffers:
            if one.copy is not None and (not one.is_large or one.module in touched):
                _fill(one.tensor, one.copy)
            elif one.copy is None and one.tensor is not None and _version(one.tensor) != one.version:
                lost.append(one)
            one.module._buffers[one.name] = one.tensor
        known = {(one.module, one.name) for one in kept.buffers}
        for module in kept.modules:
            for name in [name for name in module._buffers if (module, name) not in known]:
                del module._buffers[name]
        if lost:
            self._changing |= {one.module for one in lost}
            raise OutOfMemory(self._lost_text(lost))

    def _lost_text(self, lost: Sequence[KeptBuffer]) -> str:
        names = [
            f"{name} ({one.tensor.nbytes / 2**20:.3g} MiB)"
            for one in lost
            for name in _names(self._model, one.module)
            if name.rpartition(".")[2] == one.name
        ]
        return (
            f"the buffer {', '.join(names)} first changed in a step that has to be undone, and only up to "
            f"{COPIED_BYTES // 2**20} MiB of buffers are copied before they change: the step cannot be repeated. Use "
            "resume_from_checkpoint: true, which resumes from the newest checkpoint and copies it from its first step "
            "on; or lower max_batch_size, so that no step runs out of memory"
        )


def _all_modules(model: nn.Module) -> list[nn.Module]:
    """``model.modules()``, which nests one generator per level, in a tenth of the time."""
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
    """In the first window, where most of what is large is constant: None is no harm then."""
    with CatchOutOfMemory():
        return buffer.clone()
    return None


def _large(buffers: Sequence[torch.Tensor]) -> set[int]:
    """Identities of the buffers beyond ``COPIED_BYTES``, counted from the smallest on."""
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
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count


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
    """Those of ``modules`` and ``owner`` that are plain values, arrays, tensors or containers. Of the state of a
    trainer, which holds its log, no containers."""
    seen: set[int] = set()  # a mask that all layers hold is copied once
    attributes: Attributes = [(module, _plain_attributes(module, seen), None, is_small) for module in modules]
    if owner is not None:
        attributes.append((owner, _plain_attributes(owner, seen), set(vars(owner)), is_small))
    return attributes


def put_back_attributes(attributes: Attributes, only: Callable[[Any], bool] = lambda _: True) -> None:
    """As often as somebody changes them. Whoever holds a container, too, finds the entries of before in it. ``only``:
    which values of now."""
    for one, known, names, goes in attributes:
        now = vars(one)
        for name, (value, back) in known.items():
            if not only(now.get(name)):
                continue
            if name not in now or now[name] is not value:
                now[name] = value
            if back is not None:
                back()
        for name in [] if names is None else now.keys() - names:  # a counter that began inside
            if goes(now[name]) and only(now[name]):
                del now[name]


def _plain_attributes(one: Any, seen: set[int]) -> dict[str, tuple[Any, Optional[PutBack]]]:
    found: dict[str, tuple[Any, Optional[PutBack]]] = {}
    holders = () if isinstance(one, TrainerState) else HOLDERS
    for name, value in vars(one).items():
        if name in OF_TORCH or name in OF_DATA:
            continue
        if isinstance(value, PLAIN):
            found[name] = value, None
        elif is_array(value):
            found[name] = value, contents(value, of_array, seen)
        elif isinstance(value, holders) and (held_bytes := bytes_held(value)) is not None:
            of_other = of_array if held_bytes <= MOST_BYTES else lambda _: None
            found[name] = value, contents(value, of_other, seen)
    return found


def bytes_held(container: Any) -> Optional[int]:
    """Of tensors and arrays within. None where more than MOST_ENTRIES, or ten times as many in all, would have to be
    looked at, or where one hangs on a graph: that is a loss, or what it came from, and nobody's state."""
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
    """A plain value, array, tensor or generator, or a container that can be put back."""
    if isinstance(value, HOLDERS):
        return bytes_held(value) is not None
    return isinstance(value, PLAIN) or is_array(value)


def contents(value: Any, of_other: Callable[[Any], Optional[PutBack]], seen: set[int]) -> Optional[PutBack]:
    """What gives a container its entries back, and those within theirs, as often as called. ``of_other``: the same of
    what is no container. ``seen``: containers and tensors that are in hand: one may hold itself."""
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
    within = [back for entry in _entries(value) if (back := contents(entry, of_other, seen))]

    def put_back() -> None:
        if len(value) != len(entries) or any(map(operator.is_not, _entries(value), _entries(entries))):
            kind.clear(value)  # outputs of models refuse their own
            (kind.extend if kind in (list, deque) else kind.update)(value, entries)
        for back in within:
            back()

    return put_back


def of_array(value: Any) -> Optional[PutBack]:
    """What gives an array, tensor or generator its values back; None for everything else."""
    if type(value) is np.ndarray:
        is_kept = value.flags.writeable and value.nbytes <= MOST_BYTES
        return functools.partial(np.copyto, value, value.copy()) if is_kept else None
    if isinstance(value, GENERATORS):
        return of_generator(value)
    return functools.partial(refill, value, value.clone()) if is_state(value) else None


def is_array(value: Any) -> bool:
    return is_state(value) or type(value) is np.ndarray


def is_state(value: Any) -> bool:
    """Whether it is kept from one loss to the next: a tensor, such as a queue or a mean that moves, or a generator."""
    if type(value) is not torch.Tensor:
        return isinstance(value, GENERATORS)
    return not value.requires_grad and value.layout is torch.strided and value.nbytes <= MOST_BYTES


def refill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.shape != value.shape or tensor.dtype != value.dtype or tensor.device != value.device:
        tensor.data = value.clone()  # resized, or moved by ``.data``
    # What nobody changed may be shared, and is left alone; without memory there is nothing to change.
    elif not value.is_meta and not torch.equal(tensor, value):
        # By ``data``: a backward that still has to come may need this tensor, with the values of before.
        tensor.data.copy_(value)


def _entries(container: Any) -> Iterable[Any]:
    return (*container, *container.values()) if isinstance(container, dict) else container


class WindowSnapshot:
    """The state of RNG, buffers and gradients before a micro-batch. ``parameters``: the trainable ones; ``counting``:
    modules and their trainer, whose ``plain_attributes`` count or collect while a loss is computed."""

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
        """Whether every buffer could be put back that the micro-batch may change."""
        return all(one.copy is not None or one.tensor is None for one in self.copies.buffers)

    def restore_surroundings(self) -> None:
        """RNG, attributes and buffers, but no gradients. Raises as ``ChangingBuffers.restore``."""
        put_back(self.rng)
        put_back_attributes(self.attributes)
        self.buffers.restore(self.copies)

    def gradients_touched(self) -> bool:
        """Whether a backward has reached any gradient since."""
        return self.gradients != gradient_versions(self.parameters)


def generators(devices: Iterable[torch.device] = ()) -> States:
    """Those of torch (for the CPU and ``devices``), of numpy and of Python, as they are now."""
    return states() + of_devices(devices)


def of_devices(devices: Iterable[torch.device]) -> States:
    """Of the ``devices`` that are accelerators."""
    modules = [(getattr(torch, one.type), one) for one in devices if one.type not in ("cpu", "meta")]
    return [(functools.partial(m.set_rng_state, device=one), m.get_rng_state(one)) for m, one in modules]


def gradient_versions(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Of each parameter, what changes when its gradient does. No gradient is read, nothing waits for a device."""
    return [(0, 0) if p.grad is None else (id(p.grad), p.grad._version) for p in parameters]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside, and afterwards what it was, be it the class's own."""
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
