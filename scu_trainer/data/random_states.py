"""Save, restore and temporarily replace the random number generators of the process.

numpy and Python convert their states number by number, which takes a hundredth to a tenth of a millisecond: noticeable
in a step of a few milliseconds. So numpy's state is read again only if numbers were drawn since, Python's is copied
directly from memory, and code that runs with its own seeds gets a separate numpy generator.
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

RngStates = list[tuple[Callable[[Any], None], Any]]
"""(function that restores a generator, its state)"""

GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
"""Types of generators that a user's object may have."""

TWISTER_BYTES = 625 * 4
"""Bytes of a Mersenne Twister's state in memory: 624 words and the position in them."""

_last_read: Optional[tuple[Any, bytes, dict[str, Any]]] = None
"""numpy's generator, its memory and its state, as of the last read."""


def rng_states() -> RngStates:
    """Return the current states of the generators of torch (CPU), numpy and Python."""
    return [
        (torch.set_rng_state, torch.get_rng_state()),
        (_set_numpy, _numpy_state()),
        (_set_python, _python_state()),
    ]


def restore_rng_states(kept: RngStates) -> None:
    for restore, state in kept:
        restore(state)


def generator_restorer(value: Any) -> Optional[Callable[[], None]]:
    """Return what restores one of ``GENERATORS`` to its present state; None if it has no state, as SystemRandom."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state(legacy=False))
    return None if isinstance(value, random.SystemRandom) else functools.partial(value.setstate, value.getstate())


@contextlib.contextmanager
def preserve_rng_states() -> Iterator[None]:
    """Restore all generators on exit."""
    kept = rng_states()
    try:
        yield
    finally:
        restore_rng_states(kept)


@contextlib.contextmanager
def seeded_generators(entropy: tuple[int, ...], use: int = 0) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch (CPU) from ``entropy``, and restore them on exit. The two values
    of ``use``, 0 and 1, give different random numbers."""
    for_python, for_numpy, for_torch = _seeds(entropy)[3 * use : 3 * use + 3]
    python_state, numpy_state, torch_state = _python_state(), _numpy_state(), torch.get_rng_state()
    previous = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(_spare_generator())
        random.seed(for_python)
        numpy.random.seed(for_numpy)
        torch.default_generator.manual_seed(for_torch)
        yield
    finally:
        numpy.random.set_bit_generator(previous)  # this drops the second of two normal numbers that are drawn together
        if numpy_state["has_gauss"]:
            numpy.random.set_state(numpy_state)
        _set_python(python_state)
        torch.set_rng_state(torch_state)


@functools.lru_cache(maxsize=1)
def _seeds(entropy: tuple[int, ...]) -> list[int]:
    """Return three seeds for each of the two uses. Cached, because a batch needs both, one after the other."""
    return numpy.random.SeedSequence(entropy).generate_state(6).tolist()


@functools.cache
def _spare_generator() -> Any:
    """Return the generator that temporarily replaces numpy's. It is seeded for each use."""
    return numpy.random.MT19937(0)


def _numpy_state() -> dict[str, Any]:
    """Return ``numpy.random.get_state``, or the state of the last read if no numbers were drawn since. A normal number
    that is drawn but not returned yet is stored elsewhere: if there was one, the state is read again."""
    global _last_read
    generator = numpy.random.get_bit_generator()
    memory = _memory_of(generator)
    if memory is not None and _last_read is not None and _last_read[0] is generator and _last_read[1] == memory:
        return _last_read[2]
    state = numpy.random.get_state(legacy=False)
    _last_read = None if memory is None or state["has_gauss"] else (generator, memory, state)
    return state


def _memory_of(generator: Any) -> Optional[bytes]:
    """Return the memory of a generator's state; None if the memory layout of its type is unknown."""
    if type(generator) is not numpy.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, TWISTER_BYTES)


def _python_state() -> tuple:
    """Return the memory of Python's generator, and the normal number that it has drawn but not returned yet;
    ``random.getstate()`` if the memory layout is unknown."""
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
    """Return the memory of Python's generator: the position, then the words."""
    return ctypes.string_at(_address_of_python(), TWISTER_BYTES)


def _address_of_python() -> int:
    """Return the address of the state, which follows the header of every Python object."""
    return id(random._inst) + object.__basicsize__


@functools.cache
def _has_known_layout() -> bool:
    """Whether the memory of Python's generator matches its state. Other builds of Python may have another layout."""
    if _random.Random.__basicsize__ < object.__basicsize__ + TWISTER_BYTES:
        return False
    place, *words = numpy.frombuffer(_memory_of_python(), dtype=numpy.uint32).tolist()
    return random.getstate()[1] == (*words, place)


def _set_numpy(state: dict[str, Any]) -> None:
    global _last_read
    if _numpy_state() is not state:
        _last_read = None
        numpy.random.set_state(state)
