"""The sum of what a training holds, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scu_trainer.hardware.estimate import MARGIN, OVERHEAD, PARTS, AdditionalMemory, TrainableWeights, estimate_memory
from scu_trainer.hardware.optimizer_bytes import argument_copies, optimizer_memory_of, state_bytes

TRAINED = TrainableWeights(size_bytes=1000, weights=250, largest_bytes=400)
ADAMW = AdditionalMemory("adamw_torch_fused", holds_start=True, holds_averages=True)
TRACED = {"weights": 3000, "gradients": 100, "activations": 5000, "logits": 700}


def test_a_pass_that_is_the_highest_moment():
    found = estimate_memory(TRACED, TRAINED, ADAMW, "cuda")
    assert (found.gradients, found.activations, found.logits) == (100, 5000, 700)
    assert (found.weights, found.optimizer, found.regularization, found.averages) == (3000, 2000, 1000, 1000)
    assert found.overhead == round(OVERHEAD["cuda"].slack * 5700)
    assert found.libraries == OVERHEAD["cuda"].fixed_bytes
    assert found.peak_bytes == 3000 + 100 + 5000 + 700 + 2000 + 1000 + 1000 + found.overhead + found.libraries
    assert found.as_dict()["peak_bytes"] == sum(found.as_dict()["parts"].values())
    assert tuple(found.as_dict()["parts"]) == PARTS


def test_an_optimizer_step_that_is_the_highest_moment():
    small = {**TRACED, "activations": 300, "logits": 0}
    found = estimate_memory(small, TRAINED, replace(ADAMW, optim="adamw_torch"), "cpu")
    assert (found.gradients, found.activations, found.logits) == (1000, 2 * 400, 0)
    assert estimate_memory(small, TRAINED, ADAMW, "cpu").activations == 0, "the fused one needs nothing beside"


def test_a_known_heap_takes_the_place_of_a_share():
    held = 100 + 5000 + 700 + 4000
    assert estimate_memory(TRACED, TRAINED, ADAMW, "cpu", heap_bytes=held + 77).overhead == 77
    assert estimate_memory(TRACED, TRAINED, ADAMW, "cpu", heap_bytes=held - 77).overhead == 0


def test_kernels_for_more_shapes_are_what_libraries_take():
    found = estimate_memory(TRACED, TRAINED, ADAMW, "cpu", compiled_bytes=77)
    assert found.libraries == OVERHEAD["cpu"].fixed_bytes + 77


def test_what_is_not_held_takes_nothing():
    found = estimate_memory(TRACED, TRAINED, AdditionalMemory("sgd", False, False), "mps")
    assert (found.optimizer, found.regularization, found.averages) == (0, 0, 0)
    assert found.libraries == OVERHEAD["cpu"].fixed_bytes


def test_what_processes_keep_to_exchange_gradients():
    two = replace(ADAMW, processes=2)
    assert estimate_memory(TRACED, TRAINED, ADAMW, "cuda").exchange == 0
    assert estimate_memory(TRACED, TRAINED, two, "cuda").exchange == 1000, "as much as the gradients"
    shared = estimate_memory(TRACED, TRAINED, replace(two, zero_stage=2), "cuda")
    assert (shared.optimizer, shared.exchange) == ((2000 + 4 * 250) // 2, 1000 // 2)
    assert shared.lasting_bytes == 3000 + 1500 + 500 + 1000 + 1000 + shared.libraries


def test_what_fits_one_limit_fits_every_larger_one():
    found = estimate_memory(TRACED, TRAINED, ADAMW, "cuda")
    assert found.needed_bytes == round(found.peak_bytes * (1 + MARGIN))
    fits = [found.fits(limit) for limit in range(found.needed_bytes - 3, found.needed_bytes + 3)]
    assert fits == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    ("optim", "size_bytes"),
    [
        ("adamw_torch", 2000),
        ("adamw_bnb_8bit", 500),
        ("lion_8bit", 250),
        ("ademamix_8bit", 750),
        ("lion_32bit", 1000),
        ("adafactor", 0),
        ("sgd", 0),
        ("paged_adamw_8bit", 0),
        ("galore_adamw", 0),
        ("", 0),
    ],
)
def test_states_of_optimizers(optim, size_bytes):
    assert state_bytes(optim, TRAINED.size_bytes, TRAINED.weights) == size_bytes


@pytest.mark.parametrize(
    ("optim", "each"),
    [("lion_32bit", 4), ("rmsprop_bnb", 4), ("ademamix", 12), ("adamw_anyprecision", 8), ("adamw_torch", 4)],
)
def test_states_in_32_bits_stay_so_for_weights_in_half_precision(optim, each):
    assert state_bytes(optim, 2 * 100, 100) == each * 100


def test_what_a_step_needs_for_a_moment():
    assert optimizer_memory_of("adamw_torch_fused").step_copies == 0 < optimizer_memory_of("adamw_torch").step_copies


def test_weights_that_an_optimizer_treats_apart_have_another_state():
    """bitsandbytes keeps embeddings in 32 bits, Muon all but matrices with AdamW."""
    trained = replace(TRAINED, apart={"embeddings": 50, "no matrices": 90})
    assert AdditionalMemory("adamw_bnb_8bit", False, False).bytes_of(trained)["optimizer"] == 200 * 2 + 50 * 8
    assert AdditionalMemory("muon", False, False).bytes_of(trained)["optimizer"] == 160 * 4 + 90 * 8
    assert AdditionalMemory("adamw_torch", False, False).bytes_of(trained)["optimizer"] == 250 * 8


def test_momentum_is_a_copy_more():
    assert argument_copies("momentum=0.9, centered=True") == 2
    assert argument_copies("momentum=0.0") == argument_copies("alpha=0.9") == argument_copies(None) == 0
    assert AdditionalMemory("sgd", False, False, more_copies=1).bytes_of(TRAINED)["optimizer"] == 1000


def test_on_a_cpu_packed_states_are_unpacked_for_the_largest_weight():
    found = AdditionalMemory("adamw_bnb_8bit", False, False)
    assert found.step_blocks(TRAINED, "cpu") == [4 * 100] * 5 and found.step_blocks(TRAINED, "cuda") == []


def test_on_a_card_torch_updates_all_weights_at_once_and_memory_control_some():
    large = TrainableWeights(size_bytes=2**30, weights=2**28, largest_bytes=2**20)
    found = AdditionalMemory("adamw_torch", False, False)
    assert found.step_blocks(large, "cuda") == [2**30] and found.step_blocks(large, "mps") == [2**20] * 2
    assert replace(found, copies_parts=True).step_blocks(large, "cuda") == [2**26, 3 * 2**26]
    assert replace(found, zero_stage=2, processes=4).step_blocks(large, "cuda") == [2**28], "of its share"
    assert replace(found, optim="adamw_torch_fused").step_blocks(large, "cuda") == []


def test_memory_control_copies_what_an_optimizer_writes():
    guarded = replace(ADAMW, optim="adamw_torch", copies_parts=True)
    assert guarded.step_blocks(TRAINED, "cpu") == [400, 400, 3 * 1000], "8 MiB of weights together, so all of them"
    large = TrainableWeights(size_bytes=2**30, weights=2**28, largest_bytes=2**25)
    assert guarded.step_blocks(large, "cpu")[-1] == 3 * 2**25
    assert replace(guarded, optim="adamw_torch_fused").step_blocks(TRAINED, "cpu") == []
