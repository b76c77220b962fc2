"""The process's generators of random numbers: kept, put back, and others in their place for a while.

numpy and Python hand their states out number by number, a tenth and a hundredth of a millisecond each time, which a
step of a few milliseconds feels. So numpy's is read again only if numbers were drawn since, Python's is copied as it
lies in memory, and what draws from seeds of its own gets its own numpy generator.
"""

from __future__ import annotations

import _random
import contextlib
import ctypes
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, Optional

import numpy
import torch

States = list[tuple[Callable[[Any], None], Any]]
"""(what puts a generator back, its state)"""

GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
"""Kinds of generators that somebody may keep for himself."""

TWISTER_BYTES = 625 * 4
"""Of a Mersenne Twister's state in memory: 624 words and the place among them."""

_last_read: Optional[tuple[Any, bytes, dict[str, Any]]] = None
"""numpy's generator, what lay in its memory, and its state."""


def states() -> States:
    """Those of torch for the CPU, of numpy and of Python, as they are now."""
    return [
        (torch.set_rng_state, torch.get_rng_state()),
        (_set_numpy, _of_numpy()),
        (_set_python, _of_python()),
    ]


def put_back(kept: States) -> None:
    for restore, state in kept:
        restore(state)


def of_generator(value: Any) -> Optional[Callable[[], None]]:
    """What puts one of ``GENERATORS`` back; None where it has no state, as the system's has not."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state(legacy=False))
    return None if isinstance(value, random.SystemRandom) else functools.partial(value.setstate, value.getstate())


@contextlib.contextmanager
def states_kept() -> Iterator[None]:
    """Afterwards all is as it was."""
    kept = states()
    try:
        yield
    finally:
        put_back(kept)


@contextlib.contextmanager
def own_generators(entropy: tuple[int, ...], use: int = 0) -> Iterator[None]:
    """Those of Python, numpy and torch (CPU) seeded by ``entropy``, and afterwards as they were. ``use``: 0 or 1, which
    get different numbers."""
    for_python, for_numpy, for_torch = _seeds(entropy)[3 * use : 3 * use + 3]
    of_python, of_numpy, of_torch = _of_python(), _of_numpy(), torch.get_rng_state()
    theirs = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(_spare())
        random.seed(for_python)
        numpy.random.seed(for_numpy)
        torch.default_generator.manual_seed(for_torch)
        yield
    finally:
        numpy.random.set_bit_generator(theirs)  # which forgets the second of two normal numbers drawn at once
        if of_numpy["has_gauss"]:
            numpy.random.set_state(of_numpy)
        _set_python(of_python)
        torch.set_rng_state(of_torch)


@functools.lru_cache(maxsize=1)
def _seeds(entropy: tuple[int, ...]) -> list[int]:
    """For both uses, which follow each other in a batch."""
    return numpy.random.SeedSequence(entropy).generate_state(6).tolist()


@functools.cache
def _spare() -> Any:
    """Stands in for numpy's generator, seeded each time."""
    return numpy.random.MT19937(0)


def _of_numpy() -> dict[str, Any]:
    """``numpy.random.get_state``; the one of before where nothing was drawn since. A normal number that waits to be
    handed out lies elsewhere: where there was one the state is read again."""
    global _last_read
    generator = numpy.random.get_bit_generator()
    memory = _memory_of(generator)
    if memory is not None and _last_read is not None and _last_read[0] is generator and _last_read[1] == memory:
        return _last_read[2]
    state = numpy.random.get_state(legacy=False)
    _last_read = None if memory is None or state["has_gauss"] else (generator, memory, state)
    return state


def _memory_of(generator: Any) -> Optional[bytes]:
    """None of kinds of generators whose memory is not known."""
    if type(generator) is not numpy.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, TWISTER_BYTES)


def _of_python() -> tuple:
    """What lies in the memory of Python's generator, and the normal number that waits beside it; ``random.getstate``
    where that memory is not known."""
    if not _has_known_layout():
        return random.getstate()
    return _memory_of_python(), random._inst.gauss_next


def _set_python(state: tuple) -> None:
    if not _has_known_layout():
        random.setstate(state)
        return
    memory, random._inst.gauss_next = state
    ctypes.memmove(_address_of_python(), memory, TWISTER_BYTES)


def _memory_of_python() -> bytes:
    """The place among the words, and the words."""
    return ctypes.string_at(_address_of_python(), TWISTER_BYTES)


def _address_of_python() -> int:
    """What follows the head that every object of Python has."""
    return id(random._inst) + object.__basicsize__


@functools.cache
def _has_known_layout() -> bool:
    """Whether the memory of Python's generator is what its state says: other builds of Python may keep it otherwise."""
    if _random.Random.__basicsize__ < object.__basicsize__ + TWISTER_BYTES:
        return False
    place, *words = numpy.frombuffer(_memory_of_python(), dtype=numpy.uint32).tolist()
    return random.getstate()[1] == (*words, place)


def _set_numpy(state: dict[str, Any]) -> None:
    global _last_read
    if _of_numpy() is not state:
        _last_read = None
        numpy.random.set_state(state)
