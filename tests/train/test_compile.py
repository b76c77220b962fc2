"""``torch_compile`` in every loop: the compiled model trains to the same weights."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters
from transformers import ResNetConfig, ResNetForImageClassification

from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from tests import tiny
from tests.train.stepwise import error_of, losses_of


@pytest.fixture(autouse=True)
def _no_trace_of_the_compiler(monkeypatch):
    """TrainingArguments tells accelerate through the environment, which would compile all later tests."""
    for name in ("BACKEND", "MODE", "USE_FULLGRAPH", "USE_DYNAMIC"):
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "")
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def language_model() -> torch.nn.Module:
    return tiny.lora(tiny.llama(hidden=8, layers=1))


def small_model() -> torch.nn.Module:
    return tiny.llama(hidden=8, layers=1)


def resnet() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_labels=3, **sizes))


def plain_and_compiled(make, folder, checkpoint: bool = False, backend: str = "eager", **changes):
    changes = {"optim": "sgd", "data_collator": tiny.pad, "max_steps": 5, **changes}
    trainers = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": backend}):
        model = make()
        if checkpoint:
            checkpoint_every_layer(model)
        trainers.append(tiny.trained(model, folder / str(len(trainers)), **options, **changes))
        assert isinstance(trainers[-1].model_wrapped, OptimizedModule) == bool(options)
        assert bool(counters["stats"]["unique_graphs"]) == bool(options)
    return trainers


def assert_same_weights(plain, compiled) -> None:
    assert error_of(tiny.weights_of(compiled.model), tiny.weights_of(plain.model)) <= 1e-6
    assert error_of(dict(compiled.model.named_buffers()), dict(plain.model.named_buffers())) <= 1e-6


LOOPS = {
    "none": {},
    "regularization": {"regularization": RegularizationSettings(target_s=0.1)},
    "curriculum": {"curriculum": CurriculumSettings(curriculum="noise_guard"), "dataset": tiny.Rows(8)},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_same_weights_in_every_loop(tmp_path, loop):
    assert_same_weights(*plain_and_compiled(language_model, tmp_path, **LOOPS[loop]))


def test_chunks_of_any_length_need_few_graphs(tmp_path):
    """The second length that comes makes the length a symbol; later ones find their graph."""
    shapes = set()

    def watch(trainer) -> None:
        trainer.model.register_forward_pre_hook(
            lambda _, args, kwargs: shapes.add(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )

    changes = {"memory": MemorySettings(token_cap=24), "dataset": tiny.UnevenRows(32), "prepare": watch}
    assert_same_weights(*plain_and_compiled(small_model, tmp_path, max_steps=8, **changes))
    assert len(shapes) > 8
    assert counters["stats"]["unique_graphs"] <= 6


def test_rows_from_anywhere_in_a_batch_need_no_graph_of_their_own(tmp_path):
    """Uneven rows in micro-batches of one and two: one graph for each number of rows, and one for any length."""
    changes = {"memory": MemorySettings(max_batch_size=2), "dataset": tiny.UnevenRows(32)}
    assert_same_weights(*plain_and_compiled(small_model, tmp_path, max_steps=8, **changes))
    assert counters["stats"]["unique_graphs"] <= 3


def test_checkpointed_layers_are_compiled_too(tmp_path):
    """In one graph, and with the real division of forward and backward."""
    trainers = plain_and_compiled(small_model, tmp_path, checkpoint=True, backend="aot_eager")
    assert_same_weights(*trainers)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


# torch reads .grad of what flows between two graphs, and silences its own warning unless warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_checkpointed_layers_with_statistics_run_as_they_are(tmp_path):
    trainers = plain_and_compiled(resnet, tmp_path, checkpoint=True, dataset=tiny.images(8), backend="aot_eager")
    assert_same_weights(*trainers)


@pytest.mark.parametrize("loops", [{"memory": MemorySettings(max_batch_size=1)}, {"safety": SafetySettings()}])
def test_a_loss_that_the_next_forward_overwrites_counts_as_it_was(tmp_path, loops):
    """So do CUDA graphs (``reduce-overhead``), which no CPU has: a replay writes to the same tensors."""
    written = []

    def overwrite_as_a_replay_does(trainer) -> None:
        def replay(model, inputs) -> None:
            for loss in written[-1:]:
                loss.fill_(float("nan"))

        trainer.model.register_forward_pre_hook(replay)
        trainer.model.register_forward_hook(lambda model, inputs, output: written.append(output.loss.detach()))

    changes = {"logging_steps": 1, "gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd"}
    prepares = (None, overwrite_as_a_replay_does)
    plain, replayed = (tiny.trained(small_model(), tmp_path, prepare=one, **loops, **changes) for one in prepares)
    assert written[0].isnan() and losses_of(replayed) == losses_of(plain)
    assert error_of(tiny.weights_of(replayed.model), tiny.weights_of(plain.model)) == 0
