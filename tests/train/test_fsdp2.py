"""FSDP2 on two processes with the fields of accelerate_configs/fsdp2.yaml: which loops train, which are refused, what
is scored and saved.

This file is also the program that two processes execute. accelerate makes data parallelism of FSDP on a CPU; it is set
here that it is FSDP all the same. All that follows (sharding, collectives, DTensor weights) is the real thing.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, broadcast_object_list
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from scu_trainer import SCUTrainer, wrap
from scu_trainer.errors import CheckpointError, ControlError
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.train.loss.analysis import analysis
from scu_trainer.train.session.training import _save, score
from scu_trainer.train.step.distributed import ranks as ranks_module
from scu_trainer.train.step.distributed.sharded import BeforeFirstStep, check_fsdp, is_sharded
from scu_trainer.train.tasks.text import TextTask
from tests import processes
from tests.faults import oom
from tests.tiny import UnevenRows, arguments, images, llama, pad
from tests.train.curricula import PoisonedRows, poisoned
from tests.train.test_curriculum_faults import NormalizedNet

ROOT = Path(__file__).resolve().parents[2]
LOOPS = {
    "none": {},
    "memory": {"memory": MemorySettings(token_cap=40)},
    "curriculum": {"curriculum": CurriculumSettings(curriculum="token_budget")},
    # Rows of like length go together, so that at times one rank alone has padding to ask about.
    "both": {"memory": MemorySettings(token_cap=40), "curriculum": CurriculumSettings(curriculum="token_budget")},
    "regularization": {"regularization": RegularizationSettings(target_s=0.1)},
}


# -- what each of two processes does -----------------------------------------------------------------------------------


def shard_on_cpu() -> None:
    begin = Accelerator.__init__

    def begin_sharded(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        shared = AcceleratorState._shared_state
        shared["distributed_type"], shared["fsdp_plugin"] = DistributedType.FSDP, FullyShardedDataParallelPlugin()
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as accelerate does on GPUs

    Accelerator.__init__ = begin_sharded


class HeldOut(UnevenRows):
    """One document per row, as ``score`` reads them."""

    def __getitem__(self, key):
        if key == "document":
            return list(range(len(self)))
        return [len(self[i]["input_ids"]) for i in range(len(self))] if key == "length" else super().__getitem__(key)


JOB = SimpleNamespace(kind=TextTask())
PARTS = SimpleNamespace(batch_tokens=8192, data=SimpleNamespace(eval=HeldOut(6)), collator=pad)


def train(folder: Path, loop: dict) -> tuple[SCUTrainer, dict]:
    """And what the command does around it: held-out figures before and after, the model in a file."""
    saves = {"save_strategy": "steps", "save_steps": 3}
    args = arguments(folder, per_device_train_batch_size=4, max_steps=3, optim="sgd", learning_rate=0.3, **saves)
    trainer = SCUTrainer(llama(), args, train_dataset=UnevenRows(64), data_collator=pad, **loop)
    sharded_before = is_sharded(trainer)
    before = BeforeFirstStep(trainer, lambda: bits_per_token(trainer))
    trainer.train()
    holds_parts = isinstance(next(trainer.model.parameters()), DTensor)
    assert is_sharded(trainer) == holds_parts, "one rank would score alone and wait for the others without end"
    around = {"is_sharded": [sharded_before, is_sharded(trainer)], "bpt": [before.value, bits_per_token(trainer)]}
    trainer.save_model()
    return trainer, around


def resumed(folder: Path) -> list[SCUTrainer]:
    """Of four steps: all at once, and the last two after the checkpoint of the second."""
    loops = {**LOOPS["both"], "safety": SafetySettings()}
    trainers = []
    for steps, resume in ((4, None), (4, str(folder / "checkpoint-2"))):
        args = arguments(folder, per_device_train_batch_size=4, max_steps=steps, save_strategy="steps", save_steps=2)
        trainers.append(SCUTrainer(llama(), args, train_dataset=UnevenRows(64), data_collator=pad, **loops))
        trainers[-1].train(resume_from_checkpoint=resume)
    return trainers


def resumed_without_fsdp_before(folder: Path) -> str:
    """What is said of a checkpoint that was saved without FSDP; ``folder``: of the run that wrote it."""
    trainer = SCUTrainer(
        llama(), arguments(folder), train_dataset=UnevenRows(64), data_collator=pad, memory=MemorySettings()
    )
    with pytest.raises(CheckpointError) as refused:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return str(refused.value)


def bad_rows(folder: Path) -> dict:
    """Of 64 rows two have no finite loss, each on one rank alone."""
    args = arguments(folder, per_device_train_batch_size=4, max_steps=8)
    loops = {**LOOPS["both"], "safety": SafetySettings()}
    data = PoisonedRows(64, (3, 17))
    trainer = SCUTrainer(poisoned(llama()), args, train_dataset=data, data_collator=pad, **loops)
    return counted(trainer)


def bad_picture(folder: Path) -> dict:
    """One of 64, which spoils the losses of its batch. accelerate takes buffers only where each rank loads them."""
    data = images(64)
    data.rows[7]["pixel_values"][0, 0, 0] = math.nan
    args = arguments(folder, per_device_train_batch_size=4, max_steps=8)
    loops = {"curriculum": CurriculumSettings(), "safety": SafetySettings()}
    with mock.patch.dict(os.environ, FSDP_AUTO_WRAP_POLICY="NO_WRAP", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        return counted(SCUTrainer(NormalizedNet(), args, train_dataset=data, data_collator=pad, **loops))


def counted(trainer: SCUTrainer) -> dict:
    trainer.train()
    figures = trainer.curriculum.figures()["curriculum"]
    buffers = all(bool(buffer.isfinite().all()) for buffer in trainer.model.buffers())
    skipped = trainer.nonfinite_guard.skipped_steps
    return {"skipped": skipped, "quarantined": figures["quarantined"], "finite": buffers}


def sent_to_ask(folder: Path, rows: int) -> list[str]:
    """What one rank sent to the other in a training with batches of ``rows``."""
    sent: list[str] = []

    def told(objects: list, from_process: int) -> list:
        found = broadcast_object_list(objects, from_process)
        sent.extend(type(one).__name__ for one in found[0])
        return found

    args = arguments(folder, per_device_train_batch_size=rows, max_steps=3)
    with mock.patch.object(ranks_module, "broadcast_object_list", told):
        SCUTrainer(llama(), args, train_dataset=UnevenRows(64), data_collator=pad, memory=MemorySettings()).train()
    return sent


class OwnLoss(LlamaForCausalLM):
    """Without a public loss function, so that a curriculum asks whether its loss only happens to be that of the logits.
    The first training forward of the second rank has no finite loss."""

    forwards = 0

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        logits = super().forward(input_ids, attention_mask, use_cache=False).logits
        OwnLoss.forwards += self.training
        if os.environ["RANK"] == "1" and OwnLoss.forwards == 1:
            logits = logits * float("nan")
        learned = labels[:, 1:] != -100
        likelihoods = logits - logits.exp().sum(-1, keepdim=True).log()
        found = likelihoods[:, :-1].gather(2, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return {"loss": -found[learned].sum() / learned.sum(), "logits": logits}


class TellsNothing(LlamaForCausalLM):
    """Its loss is 0, whatever it adds up."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        return {"loss": 0.0 * super().forward(input_ids, attention_mask, use_cache=False).logits.sum()}


def steps_with_questions(folder: Path) -> list[int]:
    """Of twelve, those before which ranks asked how the loss adds up."""
    args = arguments(folder, per_device_train_batch_size=4, max_steps=12, logging_steps=100)
    loops = {"memory": MemorySettings(), "train_dataset": UnevenRows(64), "data_collator": pad}
    trainer, steps, analyze = SCUTrainer(TellsNothing(llama().config), args, **loops), [], analysis.analyze

    def noted(*given, **options):
        steps.append(trainer.state.global_step + 1)
        return analyze(*given, **options)

    with mock.patch.object(analysis, "analyze", noted):
        trainer.train()
    return steps


def first_loss_not_finite(folder: Path) -> dict:
    args = arguments(folder, per_device_train_batch_size=4, max_steps=4)
    loops = {"curriculum": CurriculumSettings(curriculum="noise_guard"), "safety": SafetySettings()}
    trainer = SCUTrainer(OwnLoss(llama().config), args, train_dataset=UnevenRows(64), data_collator=pad, **loops)
    trainer.train()
    return {"skipped": trainer.nonfinite_guard.skipped_steps, "reading": trainer.loss_path.reading.kind}


def evaluate_out_of_memory(folder: Path) -> None:
    """On the second rank alone."""
    shard_on_cpu()
    model = llama()
    args = arguments(folder, max_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    rows = {"train_dataset": UnevenRows(8), "eval_dataset": UnevenRows(16), "data_collator": pad}
    trainer = SCUTrainer(model, args, **rows, memory=MemorySettings())

    def fail(*_) -> None:
        if not model.training and os.environ["RANK"] == "1":
            raise oom()

    model.model.layers[1].register_forward_pre_hook(fail)
    trainer.train()


def bits_per_token(trainer: SCUTrainer) -> float | None:
    """None on a rank that has nothing to report."""
    scores = score(JOB, trainer, PARTS)
    return None if scores is None else scores.bpt


def checkpoints_in_shards(folder: Path) -> SCUTrainer:
    """As accelerate asks for by itself. It ends as the command does."""
    args = arguments(folder, max_steps=2, save_strategy="steps", save_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
        trainer = SCUTrainer(llama(), args, train_dataset=UnevenRows(64), data_collator=pad, safety=SafetySettings())
    trainer.train()
    _save(trainer, folder)
    return trainer


def outcome(trainer: SCUTrainer, around: dict) -> dict:
    weights = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    return {
        **around,
        "sharded": all(isinstance(weight, DTensor) for weight in weights.values()),
        "weights": {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()},
        "steps": trainer.state.global_step,
    }


def main(folder: Path) -> None:
    found = {"data parallel": outcome(*train(folder / "data parallel", {}))}
    AcceleratorState._reset_state()
    shard_on_cpu()
    for name, loop in LOOPS.items():
        try:
            found[name] = outcome(*train(folder / name, loop))
        except ControlError as error:
            found[name] = {"refused": str(error)}
    found["whole"], found["resumed"] = (outcome(trainer, {}) for trainer in resumed(folder / "resumed"))
    found["shards"] = outcome(checkpoints_in_shards(folder / "shards"), {})
    found["other"] = resumed_without_fsdp_before(folder / "data parallel")
    found["bad rows"], found["bad picture"] = bad_rows(folder / "bad rows"), bad_picture(folder / "bad picture")
    found["sent"] = {rows: sent_to_ask(folder / f"{rows} rows", rows) for rows in (1, 4)}
    found["questions"] = steps_with_questions(folder / "questions")
    found["first loss"] = first_loss_not_finite(folder / "first loss")
    with pytest.raises(ControlError) as refused:
        SCUTrainer(wrap(torch.nn.Linear(2, 2), loss=torch.nn.CrossEntropyLoss()), arguments(folder))
    found["wrapped"] = str(refused.value)
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# -- what is asserted about it -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    """What each rank found."""
    done = two_ranks(folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def two_ranks(*words) -> processes.Done:
    config = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())["fsdp_config"]
    fields = {name.upper(): str(value) for name, value in config.items()}
    environment = {**fields, "ACCELERATE_USE_FSDP": "true"}
    return processes.run([Path(__file__).resolve(), *words], ranks=2, environment=environment)


@pytest.fixture(scope="module")
def found(ranks) -> dict:
    return ranks[0]


@pytest.mark.parametrize("loop", ["none", "memory"])
def test_sharded_training_is_data_parallel_training(found, loop):
    assert found[loop]["sharded"] and not found["data parallel"]["sharded"]
    assert found[loop]["steps"] == 3
    for name, weight in found["data parallel"]["weights"].items():
        torch.testing.assert_close(found[loop]["weights"][name], weight, rtol=1e-5, atol=1e-6)


def test_a_curriculum_trains(found):
    assert found["curriculum"]["sharded"] and found["curriculum"]["steps"] == 3


def test_ranks_ask_together_how_the_loss_adds_up(found):
    """One that asks alone would wait in a forward pass for the others."""
    for name, weight in found["curriculum"]["weights"].items():
        torch.testing.assert_close(found["both"]["weights"][name], weight, rtol=1e-5, atol=1e-6)


def test_a_loss_that_tells_nothing_is_left_alone(found):
    assert found["questions"] == [1, 2, 3, 4, 5, 8]


def test_resumed_is_uninterrupted_bit_for_bit(found):
    assert found["resumed"]["steps"] == 4
    for name, weight in found["whole"]["weights"].items():
        assert torch.equal(found["resumed"]["weights"][name], weight)


def test_a_checkpoint_of_a_launch_with_other_files_of_weights_is_refused(found, folder):
    """The stock Trainer ends in a traceback: it looks for files that are not there."""
    of_data_parallelism, of_fsdp = folder / "data parallel" / "checkpoint-3", folder / "none" / "checkpoint-3"
    was = "was saved without FSDP or with save_only_model"  # with which FSDP, too, writes none of its own files
    assert f"{of_data_parallelism} {was}, and this run is under FSDP" in found["other"]
    with pytest.raises(CheckpointError, match=r"saved under FSDP, and this run is without FSDP.* begin another"):
        check_fsdp(of_fsdp, None)
    check_fsdp(of_fsdp, "FULL_STATE_DICT")
    check_fsdp(of_data_parallelism, None)
    in_shards = folder / "shards" / "checkpoint-1"
    check_fsdp(in_shards, "SHARDED_STATE_DICT")
    for checkpoint, has, wants in (
        (in_shards, "SHARDED_STATE_DICT", "FULL_STATE_DICT"),
        (of_fsdp, "FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    ):
        with pytest.raises(CheckpointError, match=f"{has}, and this run has {wants}.* set fsdp_state_dict_type: {has}"):
            check_fsdp(checkpoint, wants)


def test_bad_rows_are_set_aside_and_their_steps_skipped(found):
    """A rank that runs its batch again without them would wait for the others."""
    assert found["bad rows"] == {"skipped": 2, "quarantined": 2, "finite": True}


def test_a_bad_picture_leaves_the_good_ones_of_its_batch_and_the_running_statistics(found):
    assert found["bad picture"] == {"skipped": 1, "quarantined": 0, "finite": True}


def test_only_batches_that_can_tell_are_sent_and_no_count_that_lies_on_the_device_of_one_rank(found):
    assert found["sent"][1] == [] and set(found["sent"][4]) == {"Batch"}


def test_ranks_look_at_a_loss_of_somebodys_own_together(ranks):
    """One rank's first batch tells nothing: the other would ask alone and wait for it."""
    assert [rank["first loss"] for rank in ranks] == 2 * [{"skipped": 1, "reading": "shifted"}]


def test_out_of_memory_of_one_rank_in_an_evaluation_is_told(tmp_path):
    """It could not evaluate fewer rows: the other waits inside the same forward pass."""
    done = two_ranks(tmp_path, "evaluate")
    assert "evaluation of 4 rows does not fit in memory, and under FSDP or ZeRO-3 the other ranks wait" in done.stderr


def test_a_wrapped_module_is_refused(found):
    assert "use DDP or DeepSpeed" in found["wrapped"]


def test_all_ranks_score_a_sharded_model_together(ranks):
    """The first rank alone would wait in a forward pass for the others, who wait for it."""
    first, other = ranks
    assert first["none"]["is_sharded"] == [True, True] and first["data parallel"]["is_sharded"] == [False, False]
    assert first["none"]["bpt"] == other["none"]["bpt"] == pytest.approx(first["data parallel"]["bpt"], abs=1e-5)
    assert other["data parallel"]["bpt"] == [None, None]
    before, after = first["none"]["bpt"]
    assert before > after


@pytest.mark.parametrize("name", ["none", "shards"])
def test_the_whole_model_is_saved(found, folder, name):
    from transformers import AutoModelForCausalLM

    saved = dict(AutoModelForCausalLM.from_pretrained(folder / name).named_parameters())
    for weight_name, weight in found[name]["weights"].items():
        assert torch.equal(saved[weight_name], weight)


def test_checkpoints_may_stay_in_shards(found, folder):
    assert list((folder / "shards" / "checkpoint-1").rglob("*.distcp"))


def test_regularization_is_refused(found):
    assert "FSDP keeps the trained weights in shards" in found["regularization"]["refused"]


if __name__ == "__main__":
    (evaluate_out_of_memory if "evaluate" in sys.argv else main)(Path(sys.argv[1]))
