"""Out of memory inside an optimizer step: nothing is lost, nothing is half done, every bit is as without the fault."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import pickle

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainerCallback

from scu_trainer.errors import OutOfMemory
from scu_trainer.train.step.muon import MuonWithAdamW
from scu_trainer.train.step.recovery import optimizer_guard, second_try
from scu_trainer.train.step.recovery.optimizer_guard import OptimizerGuard
from scu_trainer.train.step.recovery.optimizer_state import preallocate
from scu_trainer.train.step.recovery.second_try import retry_unchanged
from tests import tiny
from tests.faults import oom


@contextlib.contextmanager
def attached(guard: OptimizerGuard):
    guard.attach()
    try:
        yield guard
    finally:
        guard.detach()


def bitsandbytes(name: str, **options):
    def make(groups):
        import bitsandbytes.optim

        return getattr(bitsandbytes.optim, name)(groups, lr=1e-2, **options)

    return make


def torch_optimizer(name: str, **options):
    return lambda groups: getattr(torch.optim, name)(groups, lr=1e-2, **options)


def transformers_adafactor(**options):
    return lambda groups: transformers.Adafactor(groups, **options)


def muon(groups):
    matrices = [{**g, "params": [p for p in g["params"] if p.dim() == 2]} for g in groups]
    others = [{**g, "params": [p for p in g["params"] if p.dim() != 2]} for g in groups]
    return MuonWithAdamW(matrices, others, lr=1e-2)


def low_rank(module: str, name: str, **options):
    """Projections of GaLore change in every second step, those of APOLLO, which count a seed on, in every step."""

    def make(groups):
        split = [
            {**g, "params": [p for p in g["params"] if (p.dim() == 2) == is_matrix], **(rank if is_matrix else {})}
            for g in groups
            for is_matrix in (True, False)
        ]
        return getattr(importlib.import_module(module), name)(split, **{"lr": 1e-2, **options})

    rank = {"rank": 3, "update_proj_gap": 2, "scale": 0.5, "proj_type": "std"}
    if module == "apollo_torch":
        rank |= {"proj": "random", "scale_type": "channel", "update_proj_gap": 1}
    return make


def schedule_free(name: str, **options):
    def make(groups):
        made = getattr(importlib.import_module("schedulefree"), name)(groups, lr=1e-2, **options)
        made.train()
        return made

    return make


OPTIMIZERS = {
    "adamw_fused": torch_optimizer("AdamW", fused=True),
    "adamw_foreach": torch_optimizer("AdamW", foreach=True),
    "adamw_loop": torch_optimizer("AdamW", foreach=False),
    "adam_amsgrad_foreach": torch_optimizer("Adam", amsgrad=True, foreach=True),
    "adam_amsgrad_fused": torch_optimizer("Adam", amsgrad=True, fused=True),
    "adam_maximize_loop": torch_optimizer("Adam", maximize=True, foreach=False),
    "sgd_plain_fused": torch_optimizer("SGD", fused=True),
    "sgd_momentum_fused": torch_optimizer("SGD", momentum=0.9, fused=True),
    "sgd_momentum_loop": torch_optimizer("SGD", momentum=0.9, foreach=False),
    "sgd_nesterov_foreach": torch_optimizer("SGD", momentum=0.9, nesterov=True, foreach=True),
    "rmsprop_foreach": torch_optimizer("RMSprop", momentum=0.9, centered=True, foreach=True),
    "rmsprop_loop": torch_optimizer("RMSprop", foreach=False),
    "adagrad_loop": torch_optimizer("Adagrad", initial_accumulator_value=0.1),
    "adagrad_fused": torch_optimizer("Adagrad", fused=True),
    "adadelta_foreach": torch_optimizer("Adadelta", foreach=True),
    "adamax_foreach": torch_optimizer("Adamax", foreach=True),
    "nadam_foreach": torch_optimizer("NAdam", foreach=True),
    "radam_loop": torch_optimizer("RAdam", foreach=False),
    "torch_adafactor_foreach": torch_optimizer("Adafactor", foreach=True),
    "torch_adafactor_loop": torch_optimizer("Adafactor", foreach=False),
    "adafactor": transformers_adafactor(lr=1e-2, scale_parameter=False, relative_step=False, beta1=0.9),
    "adafactor_relative": transformers_adafactor(),
    "bnb_adamw_8bit": bitsandbytes("AdamW8bit"),
    "bnb_adamw_32bit": bitsandbytes("AdamW"),
    "bnb_lion_8bit": bitsandbytes("Lion8bit"),
    "bnb_ademamix_8bit": bitsandbytes("AdEMAMix8bit"),
    "muon": muon,
    "galore_adamw": low_rank("galore_torch", "GaLoreAdamW", no_deprecation_warning=True),
    "galore_adafactor": low_rank("galore_torch", "GaLoreAdafactor", scale_parameter=False, relative_step=False),
    "apollo_adamw": low_rank("apollo_torch", "APOLLOAdamW"),
    "schedule_free_adamw": schedule_free("AdamWScheduleFree", warmup_steps=2),
    "schedule_free_adamw_loop": schedule_free("AdamWScheduleFree", foreach=False),
    "schedule_free_radam": schedule_free("RAdamScheduleFree"),
    "schedule_free_sgd": schedule_free("SGDScheduleFree", warmup_steps=2),
}
# The first momentum is a copy of the first gradient; plain SGD has no state. Adagrad makes its own when it is made.
WITHOUT_STATE_AHEAD = {name for name in OPTIMIZERS if name.startswith(("sgd", "galore", "apollo", "schedule_free"))}
STATE_AHEAD = [name for name in OPTIMIZERS if name not in WITHOUT_STATE_AHEAD and not name.startswith("adagrad")]
FUSED = [name for name in OPTIMIZERS if name.endswith("fused")]
WRITES_GRADIENTS = {"sgd_nesterov_foreach"} | {name for name in OPTIMIZERS if name.startswith("schedule_free")}

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


SHAPES = ((80, 64), (7,), (33, 5), (11,), (3, 17))


class Weights:
    """Some parameters in two groups, their optimizer, and gradients that depend on the step only."""

    def __init__(self, name: str, shapes=SHAPES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        with torch.no_grad():
            self.parameters[1][:2] = -0.0
        self.unused = torch.nn.Parameter(torch.ones(4))  # never has a gradient
        groups = [
            {"params": self.parameters[:2], "weight_decay": 0.1 if name != "sgd_nesterov_foreach" else 0.0},
            {"params": [*self.parameters[2:], self.unused], "weight_decay": 0.0},
        ]
        self.optimizer = OPTIMIZERS[name](groups)
        self.generator = generator

    @property
    def named(self):
        return [(f"weight{index}", p) for index, p in enumerate(self.parameters)]

    def backward(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=self.generator)
        self.parameters[0].grad[:, :3] = -0.0
        self.parameters[1].grad[:3] = 0.0

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def guard(self, **options) -> OptimizerGuard:
        return OptimizerGuard(self.optimizer, **{"named_parameters": self.named, "part_bytes": 200, **options})

    def bits(self):
        return [bits(p) for p in self.parameters], {
            index: {key: bits(value) for key, value in self.optimizer.state[p].items()}
            for index, p in enumerate(self.parameters)
            if p in self.optimizer.state
        } | {"groups": [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]}


def bits(value):
    if hasattr(value, "ortho_matrix"):  # GaLore's and APOLLO's projections
        return {name: bits(part) for name, part in vars(value).items()}
    return value.detach().clone().numpy().tobytes() if isinstance(value, torch.Tensor) else value


def after(name: str, steps: int, shapes=SHAPES):
    """Bits of undisturbed training."""
    weights = Weights(name, shapes)
    for _ in range(steps):
        weights.step()
    return weights.bits()


class Failing(TorchDispatchMode):
    """Raises instead of the operations for which ``fails(number, operation, tensors)`` holds; counts and lists all."""

    def __init__(self, fails=lambda number, operation, tensors: False) -> None:
        super().__init__()
        self.fails = fails
        self.operations: list = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "profiler":
            return operation(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        self.operations.append(operation)
        if self.fails(len(self.operations) - 1, operation, tensors):
            raise oom()
        return operation(*args, **(kwargs or {}))


def failing_at(k: int) -> Failing:
    return Failing(lambda number, operation, tensors: number == k)


def returns_new_memory(operation) -> bool:
    return any("Tensor" in str(item.type) and item.alias_info is None for item in operation._schema.returns)


@pytest.fixture(autouse=True)
def freed(monkeypatch) -> list[int]:
    """Instead of freeing memory, which takes long, an entry for each time."""
    times: list[int] = []
    for module in (optimizer_guard, second_try):
        monkeypatch.setattr(module, "free_memory", lambda: times.append(1))
    return times


# Preallocation


@every_optimizer
def test_training_after_preallocation_is_bitwise_the_same(name):
    weights = Weights(name)
    before = [bits(p) for p in weights.parameters]
    preallocate(weights.optimizer)
    assert [bits(p) for p in weights.parameters] == before
    assert all(p.grad is None for p in weights.parameters)
    for _ in range(3):
        weights.step()
    assert weights.bits() == after(name, 3)


@pytest.mark.parametrize("name", STATE_AHEAD)
def test_the_first_step_uses_the_preallocated_state(name):
    weights = Weights(name)
    count_bytes = preallocate(weights.optimizer)
    ahead = {id(v) for p in weights.parameters for v in weights.optimizer.state[p].values() if torch.is_tensor(v)}
    weights.step()
    state = {id(v): v for entry in weights.optimizer.state.values() for v in entry.values() if torch.is_tensor(v)}
    made_later = [value for key, value in state.items() if key not in ahead and value.dim() > 0]
    unused_state = [v for v in weights.optimizer.state[weights.unused].values() if torch.is_tensor(v) and v.dim() > 0]
    assert {id(v) for v in made_later} == {id(v) for v in unused_state}
    assert abs(count_bytes - sum(v.nbytes for v in state.values())) <= 4 * len(weights.parameters)  # Adafactor's RMS


@pytest.mark.parametrize("name", sorted(WITHOUT_STATE_AHEAD))
def test_state_that_is_made_from_the_first_gradient_is_left_alone(name, caplog):
    weights = Weights(name)
    with caplog.at_level(logging.INFO):
        assert preallocate(weights.optimizer) == 0
    values = [value for entry in weights.optimizer.state.values() for value in entry.values()]
    assert not any(torch.is_tensor(value) for value in values)  # APOLLO keeps a seed for each weight
    assert "from the first gradient" in caplog.text


class OwnStep(torch.optim.AdamW):
    """An optimizer of somebody else: its step depends on all parameters at once."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.norm() for p in parameters)
        for parameter in parameters:
            self.state[parameter]["norm"] = norm
            parameter.sub_(parameter.grad / norm)


def test_unknown_optimizers_are_neither_preallocated_nor_guarded(caplog):
    weights, stock = Weights("adamw_loop"), Weights("adamw_loop")
    weights.optimizer, stock.optimizer = OwnStep(weights.parameters), OwnStep(stock.parameters)
    with caplog.at_level(logging.INFO):
        assert preallocate(weights.optimizer) == 0
        assert not weights.optimizer.state
        with attached(weights.guard()):
            weights.step()
    stock.step()
    assert weights.bits() == stock.bits()
    assert caplog.text.count("OwnStep") == 2


def test_a_loaded_state_is_left_alone():
    first, second = Weights("adamw_foreach"), Weights("adamw_foreach")
    first.step()
    second.step()
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    assert preallocate(second.optimizer) == 0
    assert second.bits() == first.bits()


def test_gradients_that_are_there_survive_preallocation():
    weights = Weights("adamw_foreach")
    weights.backward()
    gradients = [p.grad for p in weights.parameters]
    preallocate(weights.optimizer)
    assert all(p.grad is gradient for p, gradient in zip(weights.parameters, gradients, strict=True))


@pytest.mark.parametrize("name", ["adamw_fused", "adafactor", "bnb_adamw_8bit"])
def test_preallocation_that_does_not_fit_leaves_nothing_behind(name):
    weights = Weights(name)
    with Failing() as dry_run:
        preallocate(weights.optimizer)
    allocating = [k for k, operation in enumerate(dry_run.operations) if returns_new_memory(operation)]
    assert len(allocating) > 10
    for k in allocating:
        weights = Weights(name)
        before = weights.bits()
        with pytest.raises(OutOfMemory, match=r"needs about .* GiB.*optim: adamw_8bit"), failing_at(k):
            preallocate(weights.optimizer)
        assert weights.bits() == before
        assert not weights.optimizer.state
        assert all(p.grad is None for p in weights.parameters)


def test_the_estimate_of_the_state_counts_what_is_missing():
    parameters = [torch.nn.Parameter(torch.zeros(2**20)) for _ in range(3 * 2**3)]
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    with pytest.raises(OutOfMemory, match=r"about 0\.19 GiB"), failing_at(30):  # 24 x 4 MiB x 2
        preallocate(optimizer)


# The guard


@every_optimizer
def test_guarded_steps_are_bitwise_the_stock_steps(name):
    weights = Weights(name)
    with attached(weights.guard()):
        for _ in range(3):
            weights.step()
    assert weights.bits() == after(name, 3)


@pytest.mark.parametrize("step", [1, 2])
@every_optimizer
def test_a_fault_at_any_operation_changes_nothing(name, step):
    """In the first step, which makes the state, and in the next."""
    is_large = name.startswith("bnb")  # small weights have their state in 32 bits
    shapes = ((80, 64) if is_large else (20, 10), (7,), (33, 5))
    expected = after(name, step, shapes)

    def run(mode) -> tuple:
        weights = Weights(name, shapes)
        guard = weights.guard(part_bytes=10_000 if is_large else 700)  # two parts, or one per group if fused
        for _ in range(step - 1):
            weights.step()
        with attached(guard):
            weights.backward()
            gradients = [p.grad for p in weights.parameters]
            with mode:
                weights.optimizer.step()
        assert all(p.grad is gradient for p, gradient in zip(weights.parameters, gradients, strict=True))
        return weights.bits(), guard.recoveries

    dry_run = Failing()
    assert run(dry_run) == (expected, 0)
    for k in range(len(dry_run.operations)):
        assert run(failing_at(k)) == (expected, 1), dry_run.operations[k]


@pytest.mark.parametrize("name", ["adamw_fused", "adamw_foreach", "adamw_loop", "adafactor", "bnb_adamw_8bit"])
@pytest.mark.parametrize("capacity", [1, 2])
def test_parts_shrink_until_they_fit(name, capacity, freed):
    """Fails whenever more than ``capacity`` weights have a gradient, at the last operation that can fail."""
    weights = Weights(name)
    weights.step()

    def does_not_fit(number, operation, tensors) -> bool:
        visible = [p for p in weights.parameters if p.grad is not None]
        return len(visible) > capacity and any(t is visible[-1] for t in tensors) and operation._schema.is_mutable

    with attached(weights.guard(part_bytes=10**9)) as guard:
        weights.backward()
        with Failing(does_not_fit):
            weights.optimizer.step()
    assert weights.bits() == after(name, 2)
    assert len(freed) == guard.recoveries >= 1
    assert not guard.half_stepped


def test_a_size_that_fitted_is_where_the_next_step_begins():
    weights = Weights("adamw_foreach")
    largest_bytes = max(p.nbytes for p in weights.parameters)

    def does_not_fit(number, operation, tensors) -> bool:
        return sum(p.nbytes for p in weights.parameters if p.grad is not None) > largest_bytes

    counts = []
    with attached(weights.guard(part_bytes=None)) as guard:
        for _ in range(3):
            weights.backward()
            with Failing(does_not_fit):
                weights.optimizer.step()
            counts.append(guard.recoveries)
    assert counts == [1, 1, 1]
    assert weights.bits() == after("adamw_foreach", 3)


def test_one_failure_teaches_the_rest_of_the_step():
    weights = Weights("adamw_foreach", [(10,)] * 16)
    with attached(weights.guard(part_bytes=4 * 40)) as guard:
        weights.optimizer.zero_grad()
        for parameter in weights.parameters:
            parameter.grad = torch.ones(10)
        with Failing(lambda *_: sum(p.grad is not None for p in weights.parameters) > 2):
            weights.optimizer.step()
    assert guard.recoveries == 1  # not once for each of four parts


def test_nothing_fits(freed):
    weights = Weights("adamw_foreach")
    weights.step()
    before = weights.bits()
    weights.backward()
    gradients = [p.grad for p in weights.parameters]
    guard = weights.guard()
    always_at_the_last = Failing(lambda number, operation, tensors: "addcdiv" in str(operation))
    with (
        attached(guard),
        pytest.raises(OutOfMemory, match=r"weight0 \(80 x 64, 0.0195 MiB\) alone; no weight was changed"),
        always_at_the_last,
    ):
        weights.optimizer.step()
    assert weights.bits() == before
    assert not guard.half_stepped
    assert all(p.grad is gradient for p, gradient in zip(weights.parameters, gradients, strict=True))
    assert freed
    weights.optimizer.step()  # memory is back
    assert weights.bits() == after("adamw_foreach", 2)


def test_counts_of_groups_are_as_before_where_nothing_fits():
    weights = Weights("schedule_free_adamw")
    weights.step()
    before = weights.bits()
    with attached(weights.guard()):
        weights.backward()
        late = Failing(lambda number, operation, tensors: "lerp" in str(operation))
        with pytest.raises(OutOfMemory, match="no weight was changed"), late:
            weights.optimizer.step()
    assert weights.bits() == before


def test_one_parameter_that_never_fits_while_others_did():
    weights = Weights("adamw_loop")
    small = weights.parameters[1]
    guard = weights.guard()
    with (
        attached(guard),
        pytest.raises(OutOfMemory, match=r"weight1 .*from the last checkpoint"),
        Failing(lambda number, operation, tensors: any(t is small for t in tensors)),
    ):
        weights.step()
    assert guard.half_stepped
    stepped, (values, states) = after("adamw_loop", 1), weights.bits()
    assert values[0] == stepped[0][0]
    assert values[1] == Weights("adamw_loop").bits()[0][1]
    assert 1 not in states


def test_other_errors_are_not_taken_for_out_of_memory():
    weights = Weights("adamw_loop")
    weights.backward()
    weights.parameters[1].grad = weights.parameters[1].grad.to_sparse()
    with attached(weights.guard()) as guard, pytest.raises(RuntimeError, match="sparse gradients"):
        weights.optimizer.step()
    assert guard.recoveries == 0
    assert all(p.grad is not None for p in weights.parameters)


def test_the_failed_update_is_let_go_before_memory_is_freed(monkeypatch):
    """Temporary tensors of the failed update must be gone when ``free_memory`` runs."""
    import gc
    import weakref

    temporary, alive = [], []

    class Watch(Failing):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            result = super().__torch_dispatch__(operation, types, args, kwargs)
            if "_foreach_sqrt" in str(operation):
                temporary.extend(weakref.ref(t) for t in result)
            return result

    weights = Weights("adamw_foreach")
    monkeypatch.setattr(
        optimizer_guard, "free_memory", lambda: alive.append(sum(ref() is not None for ref in temporary))
    )
    guard = weights.guard()
    gc.disable()
    try:
        with attached(guard), Watch(lambda number, operation, tensors: "addcdiv" in str(operation) and not alive):
            weights.step()
    finally:
        gc.enable()
    assert alive == [0]
    assert temporary


@pytest.mark.parametrize("name", FUSED)
def test_fused_updates_allocate_nothing_and_cannot_fail_half_way(name):
    """What lets them run without copies: per group one addition to the counters, then one kernel."""
    weights = Weights(name)
    weights.step()
    weights.backward()
    with Failing() as seen:
        weights.optimizer.step()
    assert not any(returns_new_memory(operation) for operation in seen.operations)
    kernels = [str(operation).split(".")[1] for operation in seen.operations]
    one_group = kernels[: len(kernels) // 2]
    assert kernels == one_group * 2
    assert [kernel.startswith("_fused") for kernel in one_group] == [False] * (len(one_group) - 1) + [True]
    assert one_group[:-1] in ([], ["_foreach_add_"])


@pytest.mark.parametrize("name", FUSED)
def test_fused_updates_run_whole_and_without_copies(name):
    weights = Weights(name)
    weights.step()
    weights.backward()
    with attached(weights.guard()), Failing() as seen:
        weights.optimizer.step()
    assert sum(str(operation).startswith("aten._fused") for operation in seen.operations) == 2  # one per group
    new = [operation for operation in seen.operations if returns_new_memory(operation)]
    assert {str(operation) for operation in new} <= {"aten.stack.default"}


PAGED = ["bnb_adamw_8bit", "bnb_adamw_32bit", "bnb_lion_8bit"]


def with_pages(name: str) -> Weights:
    """After a first step, the state of two weights as it would be on a card. Pages of a CPU are stepped alike."""
    weights = Weights(name)
    weights.step()
    for parameter in weights.parameters[:3:2]:
        weights.optimizer.state[parameter]["state1"].is_paged = True
    return weights


@pytest.mark.parametrize("name", PAGED)
def test_paged_state_is_updated_without_copies(name, monkeypatch):
    pytest.importorskip("bitsandbytes")
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    weights = with_pages(name)
    copied = []
    saved = optimizer_guard.SavedPart
    monkeypatch.setattr(optimizer_guard, "SavedPart", lambda o, part: copied.extend(part.pairs) or saved(o, part))
    with attached(weights.guard()):
        weights.step()
    assert {id(parameter) for parameter, _ in copied} == {id(weights.parameters[i]) for i in (1, 3, 4)}
    assert weights.bits() == after(name, 2) and not waits


@pytest.mark.parametrize("name", PAGED)
def test_a_paged_update_that_fails_is_repeated_after_a_copy(name, monkeypatch):
    """And the host touches pages only when the card has done all that it was given."""
    pytest.importorskip("bitsandbytes")
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    weights = with_pages(name)
    weights.backward()
    kernels = []

    def fails(number, operation, tensors) -> bool:
        if operation.namespace != "bitsandbytes" or not any(tensor is weights.parameters[2] for tensor in tensors):
            return False
        kernels.append(operation)
        return len(kernels) <= 2  # in place, and with a copy beside the weight

    guard = weights.guard()
    with attached(guard), Failing(fails):
        weights.optimizer.step()
    assert guard.recoveries == 2 and len(kernels) == 3
    assert weights.bits() == after(name, 2)
    assert len(waits) == 3  # before the copy, before it is put back, before the copy on the host


@every_optimizer
def test_only_known_optimizers_write_to_gradients(name):
    """Gradients are not copied before the others' updates."""
    weights = Weights(name)
    written = []
    for _ in range(2):
        weights.backward()
        before = [bits(p.grad) for p in weights.parameters]
        weights.optimizer.step()
        written.append([bits(p.grad) for p in weights.parameters] != before)
    assert any(written) == (name in WRITES_GRADIENTS)


# Living with everybody else


@pytest.mark.parametrize("name", ["adamw_fused", "adamw_foreach"])
@pytest.mark.parametrize("first", ["guard", "others"])
def test_hooks_of_others_run_once_and_see_gradients(name, first):
    weights = Weights(name)
    seen = []

    def hook(label):
        return lambda optimizer, *_: seen.append(
            (label, sum(p.grad is not None for p in weights.parameters), len(optimizer.param_groups))
        )

    guard = weights.guard()
    if first == "guard":
        guard.attach()
    weights.optimizer.register_step_pre_hook(hook("before"))
    weights.optimizer.register_step_post_hook(hook("after"))
    guard.attach()
    for _ in range(2):
        weights.step()
    guard.detach()
    assert seen == [("before", 5, 2), ("after", 5, 2)] * 2
    assert weights.bits() == after(name, 2)


@pytest.mark.parametrize("name", ["adamw_fused", "adamw_foreach"])
def test_interrupted_before_the_stock_call_ends_it_leaves_gradients_and_groups(name):
    weights = Weights(name)
    weights.step()
    weights.backward()

    def interrupt(optimizer, *_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), attached(weights.guard()):
        hook = weights.optimizer.register_step_post_hook(interrupt)
        weights.optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
        weights.optimizer.step()
    assert all(p.grad is not None for p in weights.parameters) and len(weights.optimizer.param_groups) == 2
    assert weights.bits() == after(name, 2)


@pytest.mark.parametrize("name", ["adamw_fused", "adamw_foreach"])
def test_the_step_after_an_interrupted_one_is_taken(name):
    weights = Weights(name)
    weights.step()  # makes the state

    def interrupt(optimizer, *_):
        raise KeyboardInterrupt

    with attached(weights.guard()):
        hook = weights.optimizer.register_step_post_hook(interrupt)
        weights.optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
        weights.backward()
        with pytest.raises(KeyboardInterrupt):
            weights.optimizer.step()
        hook.remove()
        weights.backward()
        weights.optimizer.step()
    assert weights.bits() == after(name, 3)


def test_a_hook_that_came_after_the_guard_costs_one_unguarded_step():
    weights = Weights("adamw_foreach")
    guard = weights.guard()
    with attached(guard):
        weights.optimizer.register_step_pre_hook(lambda *_: None)
        weights.step()
        weights.backward()
        with failing_at(5):
            weights.optimizer.step()
    assert guard.recoveries == 1
    assert weights.bits() == after("adamw_foreach", 2)


def test_schedulers_state_dicts_and_pickles_do_not_notice():
    weights, stock = Weights("adamw_foreach"), Weights("adamw_foreach")
    schedulers = [torch.optim.lr_scheduler.LinearLR(w.optimizer, total_iters=3) for w in (weights, stock)]
    with attached(weights.guard()):
        for _ in range(3):
            for one, scheduler in zip((weights, stock), schedulers, strict=True):
                one.step()
                scheduler.step()  # warns if it has not seen the optimizer step
        restored = pickle.loads(pickle.dumps(weights.optimizer))
        assert not restored._optimizer_step_pre_hooks
        assert restored.state_dict().keys() == stock.optimizer.state_dict().keys()
        assert copy.deepcopy(weights.optimizer).param_groups[0]["lr"] == stock.optimizer.param_groups[0]["lr"]
    assert weights.bits() == stock.bits()
    assert not weights.optimizer._optimizer_step_pre_hooks
    assert not weights.optimizer._optimizer_step_post_hooks


def test_closures_pass_through():
    weights, stock = Weights("sgd_momentum_loop"), Weights("sgd_momentum_loop")

    def closure(of):
        of.backward()
        return torch.tensor(3.0)

    with attached(weights.guard()):
        assert weights.optimizer.step(lambda: closure(weights)) == 3.0
        assert weights.optimizer.step(closure=lambda: closure(weights)) == 3.0
    for _ in range(2):
        stock.optimizer.step(lambda: closure(stock))
    assert weights.bits() == stock.bits()


@pytest.mark.parametrize(
    ("name", "failing"),
    [
        ("adamw_foreach", "_foreach_add_"),
        ("adamw_fused", "_foreach_add_"),
        ("muon", "lerp"),
        ("schedule_free_adamw", "_foreach_add_"),
    ],
)
def test_under_accelerate_with_a_gradient_scaler(name, failing):
    """Accelerate keeps the step() that it found and puts it back at every step."""
    Accelerator(cpu=True)

    def run(guarded: bool, mode) -> tuple:
        weights = Weights(name)
        # finite scale: a fault must not be mistaken for an overflow
        optimizer = AcceleratedOptimizer(weights.optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
        guard = OptimizerGuard(optimizer, part_bytes=200)
        with attached(guard) if guarded else contextlib.nullcontext():
            for index in range(2):
                weights.backward()
                optimizer.scaler.scale(torch.ones(()))
                with mode if index else contextlib.nullcontext():
                    optimizer.step()
                assert not optimizer.step_was_skipped
        return weights.bits(), guard.recoveries

    expected, _ = run(False, contextlib.nullcontext())
    fails = Failing(lambda number, operation, tensors: failing in str(operation) and not fails.raised())
    fails.raised = lambda: any(failing in str(operation) for operation in fails.operations[:-1])
    assert run(True, fails) == (expected, 1)


# Inside the stock loop


class Guarding(TrainerCallback):
    """What a trainer does with the guard, and a fault at operation ``7 * step`` of each optimizer step."""

    def __init__(self, faults: bool) -> None:
        self.faults = faults
        self.modes = contextlib.ExitStack()
        self.rates: list[float] = []

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
        self.allocated_bytes = preallocate(optimizer)
        self.guard = OptimizerGuard(optimizer, model.named_parameters(), 3000)
        self.guard.attach()

    def on_pre_optimizer_step(self, args, state, control, **_):
        if self.faults:
            self.modes.enter_context(failing_at(7 * state.global_step))

    def on_optimizer_step(self, args, state, control, optimizer=None, **_):
        self.modes.close()
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_end(self, args, state, control, **_):
        self.guard.detach()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "adamw_8bit", "sgd"])
def test_a_run_with_faults_ends_with_the_stock_weights(optim, tmp_path):
    def run(callback):
        options = tiny.arguments(
            tmp_path, optim=optim, max_steps=5, lr_scheduler_type="linear", warmup_steps=2, weight_decay=0.1
        )
        trainer = Trainer(
            tiny.llama(hidden=64), options, train_dataset=tiny.Rows(), callbacks=[callback] if callback else None
        )
        trainer.train()
        return trainer

    guarding = Guarding(faults=True)
    guarded, stock = run(guarding), run(None)
    assert tiny.same(tiny.weights_of(guarded.model), tiny.weights_of(stock.model))
    assert guarding.guard.recoveries >= (4 if optim != "adamw_torch_fused" else 1)
    assert (guarding.allocated_bytes > 0) == (optim != "sgd")
    assert len(set(guarding.rates)) > 3
    assert guarded.lr_scheduler.last_epoch == stock.lr_scheduler.last_epoch == guarded.state.global_step


# Clipping


def gradients(count: int = 2) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 2.0)
    return parameters


def failing_once(before: bool):
    calls = []

    def clip(parameters):
        calls.append(1)
        if before and len(calls) == 1:
            raise oom()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        if len(calls) == 1:
            raise oom()
        return norm

    return clip, calls


def test_clipping_is_repeated_when_no_gradient_was_written(freed):
    parameters, expected = gradients(), gradients()
    clip, calls = failing_once(before=True)
    norm = retry_unchanged(lambda: clip(parameters), [p.grad for p in parameters])
    assert norm == torch.nn.utils.clip_grad_norm_(expected, 1.0)
    assert [bits(p.grad) for p in parameters] == [bits(p.grad) for p in expected]
    assert (len(calls), len(freed)) == (2, 1)


@pytest.mark.parametrize("error", [None, ValueError("no"), RuntimeError("no")])
def test_clipping_is_not_repeated_after_writes_or_other_errors(error, freed):
    parameters = gradients()
    clip, calls = failing_once(before=False)

    def function():
        if error is None:
            return clip(parameters)
        calls.append(1)
        raise error

    with pytest.raises(type(error or oom())):
        retry_unchanged(function, [p.grad for p in parameters])
    assert calls == [1] and not freed


def test_clipping_that_fails_twice_raises():
    calls = []

    def function():
        calls.append(1)
        raise oom()

    with pytest.raises(torch.OutOfMemoryError):
        retry_unchanged(function)
    assert calls == [1, 1]
