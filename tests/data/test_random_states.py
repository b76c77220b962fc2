"""States of generators of random numbers: what was read before stands only where nothing was drawn since."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from scu_trainer.data.random_states import preserve_rng_states, restore_rng_states, rng_states, seeded_generators


def draw() -> tuple:
    return (
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(),
        numpy.random.normal(),
        numpy.random.normal(size=3).tolist(),
        torch.randn(1).item(),
    )


def seed() -> None:
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)


@pytest.mark.parametrize("normals", [0, 1, 2], ids=["none waits", "one waits", "both handed out"])
@pytest.mark.parametrize("reads", [1, 2])
def test_what_is_put_back_is_drawn_again(normals, reads):
    """numpy draws normal numbers by two, and keeps the second."""
    seed()
    for _ in range(reads):
        kept = rng_states()
    numpy.random.normal(size=normals)
    kept = rng_states()
    drawn = draw()
    restore_rng_states(kept)
    assert draw() == drawn
    restore_rng_states(kept)
    assert draw() == drawn


def test_a_state_is_read_anew_where_the_last_waiting_normal_number_was_handed_out():
    seed()
    numpy.random.normal()
    rng_states()
    numpy.random.normal()  # the one that waited: no other number is drawn
    kept = rng_states()
    drawn = draw()
    restore_rng_states(kept)
    assert draw() == drawn


@pytest.mark.parametrize("normals", [0, 1], ids=["none waits", "one waits"])
def test_own_generators_leave_those_of_the_process_as_they_were(normals):
    seed()
    numpy.random.normal(size=normals), random.gauss(0, 1)
    with preserve_rng_states():
        expected = draw()
    for _ in range(2):
        with seeded_generators((1, 2, 3)):
            own = draw()
    assert draw() == expected
    with seeded_generators((1, 2, 3)):
        assert draw() == own


def test_own_generators_draw_what_their_seeds_say():
    for_python, for_numpy, for_torch = numpy.random.SeedSequence((4, 5)).generate_state(3).tolist()
    numpy.random.normal()  # the one that waits is the process's
    with seeded_generators((4, 5)):
        own = random.random(), numpy.random.normal(), torch.randn(1).item()
    random.seed(for_python), numpy.random.seed(for_numpy), torch.default_generator.manual_seed(for_torch)
    assert own == (random.random(), numpy.random.normal(), torch.randn(1).item())


def test_another_kind_of_generator_is_kept_as_well():
    theirs = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(7))
        with preserve_rng_states():
            drawn = draw()
        assert draw() == drawn
    finally:
        numpy.random.set_bit_generator(theirs)
