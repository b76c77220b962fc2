"""``with_loops`` over trainers that nobody here wrote: TRL's, and a user's own. docs/any_trainer.md is its page."""

from __future__ import annotations

import copy
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)

pytest.importorskip("trl")
from datasets import Dataset
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import (
    BEMACallback,
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
    SyncRefModelCallback,
)
from trl.experimental import bema_for_ref_model
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from scu_trainer import SCUTrainer, with_loops
from scu_trainer.errors import ControlError, DataError, OutOfMemory, SettingsError
from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from tests import tiny
from tests.faults import FakeGauge
from tests.train.stepwise import FailsOnce, apart

# TRL says so of trainers in trl.experimental, and of the sampler that KTO asks the stock Trainer for.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"
TEXTS = [f"shelf {i} holds {3 * i + 1} plates"[: 10 + (7 * i) % 14] for i in range(32)]
PAIRS = {"chosen": [text[5:] for text in TEXTS], "rejected": [text[5:][::-1] for text in TEXTS]}
PROMPTS = {"prompt": [text[:5] for text in TEXTS]}
ROWS = {
    "SFT": {"text": TEXTS},
    "DPO": {**PROMPTS, **PAIRS},
    "KTO": {**PROMPTS, "completion": PAIRS["chosen"], "label": [i % 2 == 0 for i in range(32)]},
    "ORPO": {**PROMPTS, **PAIRS},
    "Reward": {"chosen": TEXTS, "rejected": [text[::-1] for text in TEXTS]},
}
KINDS = {
    "SFT": (SFTTrainer, SFTConfig),
    "DPO": (DPOTrainer, DPOConfig),
    "KTO": (KTOTrainer, KTOConfig),
    "ORPO": (ORPOTrainer, ORPOConfig),
    "Reward": (RewardTrainer, RewardConfig),
}
SPLIT = ("SFT",)
"""Whose loss is a sum over rows; a sample of the others is a pair of rows, in one batch with others'."""

STEPS = 4
SCU = RegularizationSettings(law="fixed", lambda_init=20.0, tokens=1e3)
# About the samples and their losses: a row of a run without a curriculum stays as it is.
TIMES = re.compile(r"_runtime$|_per_second$|^total_flos$|_time$")


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<s>": 0, "</s>": 1, "<pad>": 2} | {letter: i + 3 for i, letter in enumerate(LETTERS)}
    made = Tokenizer(WordLevel(words, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="</s>"
    )


def model_of(name: str) -> torch.nn.Module:
    if name != "Reward":
        return tiny.small_llama()
    config = tiny.small_llama().config
    config.num_labels, config.pad_token_id = 1, 2
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def made(name: str, folder: Path, looped: bool = True, **given: Any) -> Trainer:
    kind, config = KINDS[name]
    names = {"save_strategy", "save_steps", "max_steps", "loss_type"}
    changes = {key: given.pop(key) for key in names & set(given)}
    args = config(
        str(folder),
        **{"max_steps": STEPS, "save_strategy": "no", **changes},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    if name in ("DPO", "KTO"):
        given["ref_model"] = model_of(name)
    rows = Dataset.from_dict(ROWS[name])
    kind = with_loops(kind) if looped else kind
    return kind(model=model_of(name), args=args, train_dataset=rows, processing_class=tokenizer(), **given)


def trained(name: str, folder: Path, looped: bool = True, resume=None, **given: Any) -> Trainer:
    trainer = made(name, folder, looped, **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logs(trainer: Trainer) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not TIMES.search(key)} for row in trainer.state.log_history]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """name -> what the trainer as it comes has trained, with its checkpoint of step 2."""
    return {
        name: trained(name, tmp_path_factory.mktemp(name), False, save_strategy="steps", save_steps=2) for name in KINDS
    }


# -- off ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_without_loops_it_is_the_trainer_itself(tmp_path, stock, name):
    found = trained(name, tmp_path, save_strategy="steps", save_steps=2)
    assert tiny.same(tiny.weights_of(found.model), tiny.weights_of(stock[name].model))
    assert logs(found) == logs(stock[name])
    assert found.is_stock and found.loops == []
    expected = Path(stock[name].args.output_dir)
    files = {str(path.relative_to(expected)) for path in expected.rglob("*") if path.is_file()}
    ours = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {path for path in ours - files if not path.endswith("manifest.json")} == set() and files <= ours


def reward(completions, **_) -> list[float]:
    return [float(len(set(text))) for text in completions]


TURNS = [
    [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    for prompt, answer in zip(PROMPTS["prompt"], PAIRS["chosen"], strict=True)
]
DRAWN = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}  # without a reference model from the Hub
ALSO_OFF = {
    "GRPO": (GRPOTrainer, GRPOConfig, DRAWN, PROMPTS),
    "RLOO": (RLOOTrainer, RLOOConfig, DRAWN, PROMPTS),
    "CPO": (CPOTrainer, CPOConfig, {"max_length": 32}, {**PROMPTS, **PAIRS}),
    "OnlineDPO": (OnlineDPOTrainer, OnlineDPOConfig, {"max_length": 32, "max_new_tokens": 6}, PROMPTS),
    "GKD": (GKDTrainer, GKDConfig, {"max_length": 32, "max_new_tokens": 6}, {"messages": TURNS}),
    "Distillation": (DistillationTrainer, DistillationConfig, {"max_completion_length": 6}, PROMPTS),
}
"""Trainers of which no more is claimed: class, configuration, its arguments, rows."""


def also_trained(name: str, folder: Path, looped: bool, resume=None, **given: Any) -> Trainer:
    kind, config, own, rows = ALSO_OFF[name]
    common = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "bf16": False, "logging_steps": 1}
    args = config(str(folder), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, **common, **own)
    parts = dict.fromkeys(("GKD", "Distillation"), lambda: {"teacher_model": tiny.small_llama(seed=3)}) | {"CPO": dict}
    words = tokenizer()
    words.chat_template = "{% for turn in messages %}{{ turn['content'] }}</s>{% endfor %}"
    given = parts.get(name, lambda: {"reward_funcs": reward})() | given
    kind = with_loops(kind) if looped else kind
    trainer = kind(
        model=tiny.small_llama(), args=args, train_dataset=Dataset.from_dict(rows), processing_class=words, **given
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("name", ALSO_OFF)
def test_others_are_themselves_without_loops_and_with_memory(tmp_path, name):
    """Also where a step runs out of memory; a cap cuts no batch from which a trainer generates."""
    expected, off = also_trained(name, tmp_path, False), also_trained(name, tmp_path, True)
    assert off.is_stock and logs(off) == logs(expected)
    cap = MemorySettings(token_cap=24)
    on = also_trained(name, tmp_path, True, memory=cap, safety=SafetySettings())
    fault = FailsOnce()
    survived = also_trained(name, tmp_path, True, memory=cap, callbacks=[fault])
    assert fault.failed == 1
    for found in (off, on, survived):
        assert tiny.same(tiny.weights_of(found.model), tiny.weights_of(expected.model))
    for ours, theirs in zip(logs(survived), logs(expected), strict=True):
        assert {key: ours[key] for key in theirs} == theirs
    assert not tiny.same(tiny.weights_of(off.model), tiny.weights_of(tiny.small_llama()))


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_what_was_generated_is_put_back_where_a_later_batch_of_the_step_has_replaced_it(tmp_path, name, monkeypatch):
    """Generations of three batches, steps of two: the second step begins with the last of one, and makes the next."""
    kind, config, own, rows = ALSO_OFF[name]
    own = {**own, "gradient_accumulation_steps": 2, "steps_per_generation": 3}
    monkeypatch.setitem(ALSO_OFF, name, (kind, config, own, rows))
    expected, fault = also_trained(name, tmp_path, False), FailsOnce(backward=4)
    found = also_trained(name, tmp_path, True, memory=MemorySettings(), callbacks=[fault])
    assert fault.failed == 1 and tiny.same(tiny.weights_of(found.model), tiny.weights_of(expected.model))


class Stricter:
    """A reward that depends on how often it was asked, and on what it has seen."""

    def __init__(self) -> None:
        self.__name__, self.asked, self.seen = "stricter", 0, []

    def reward(self, completions, **_) -> list[float]:
        self.asked += 1
        self.seen.append(len(completions[0]))
        return [len(set(text)) ** (1 / self.asked) - sum(self.seen) * (i % 2) for i, text in enumerate(completions)]


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_what_a_reward_keeps_does_not_hold_what_ran_out_of_memory(tmp_path, name):
    first, second = Stricter(), Stricter()
    expected = also_trained(name, tmp_path, False, reward_funcs=first.reward)
    fault = FailsOnce()
    found = also_trained(name, tmp_path, True, memory=MemorySettings(), callbacks=[fault], reward_funcs=second.reward)
    assert fault.failed == 1 and (second.asked, second.seen) == (first.asked, first.seen)
    assert tiny.same(tiny.weights_of(found.model), tiny.weights_of(expected.model))


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_an_evaluation_that_generates_again_gives_the_same_texts_and_rewards(tmp_path, name):
    def evaluated(looped: bool, **given: Any) -> tuple[dict[str, float], Stricter, float]:
        strict, left = Stricter(), [looped]
        rows = Dataset.from_dict({"prompt": PROMPTS["prompt"][:4]})
        trainer = also_trained(name, tmp_path, looped, reward_funcs=strict.reward, eval_dataset=rows, **given)
        asked = strict.asked

        def fail(*_: Any) -> None:
            if strict.asked > asked and left[0]:  # it has generated, and asked for the rewards
                left[0] = False
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        trainer.model.model.register_forward_pre_hook(fail)
        torch.manual_seed(5)
        found = trainer.evaluate()
        assert not left[0]
        return {key: value for key, value in found.items() if not TIMES.search(key)}, strict, torch.rand(1).item()

    (expected, theirs, then), (found, ours, now) = evaluated(False), evaluated(True, memory=MemorySettings())
    assert found == pytest.approx(expected, nan_ok=True) and now == then
    assert (ours.asked, ours.seen) == (theirs.asked, theirs.seen)


class Episodes:
    """An environment that counts beyond ``reset``, and rewards by its count."""

    def __init__(self) -> None:
        self.begun = self.looked = 0

    def reset(self, **_) -> None:
        self.begun += 1

    def look(self, where: str) -> str:
        """Look somewhere.

        Args:
            where: the place
        """
        self.looked += 1
        return str(self.looked)

    def get_reward(self) -> float:
        return float(self.begun)


@pytest.mark.parametrize("kind", ["tools", "environment_factory"])
def test_what_is_called_while_texts_are_generated_does_not_count_what_ran_out_of_memory(tmp_path, kind, monkeypatch):
    call = {"type": "function", "function": {"name": "look", "arguments": {"where": "x"}}}
    parsed = {"role": "assistant", "content": "", "tool_calls": [call]}  # a model that calls its tool after each text
    monkeypatch.setattr("trl.trainer.grpo_trainer.parse_response", lambda *_, **__: copy.deepcopy(parsed))
    words = tokenizer()
    words.response_schema = {"type": "object"}
    words.chat_template = (
        "{% for turn in messages %}{{ turn['content'] }}{{ turn['tool_calls'] | default('') }}</s>{% endfor %}"
    )
    rows = Dataset.from_dict({"prompt": [turns[:1] for turns in TURNS]})

    def run(looped: bool, **given: Any) -> tuple[Trainer, list[tuple[int, int]]]:
        own = {**DRAWN, "max_completion_length": 12, "max_tool_calling_iterations": 1}
        args = GRPOConfig(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, bf16=False,
            use_cpu=True, report_to="none", disable_tqdm=True, **own,
        )  # fmt: skip
        alone = Episodes()
        called = {"tools": [alone.look]} if kind == "tools" else {kind: Episodes}
        trainer = (with_loops(GRPOTrainer) if looped else GRPOTrainer)(
            model=tiny.small_llama(), args=args, train_dataset=rows, processing_class=words,
            reward_funcs=lambda completions, **_: [len(str(text)) for text in completions], **called, **given,
        )  # fmt: skip
        trainer.train()
        counting = [alone] if kind == "tools" else trainer._environment_pool[None]
        return trainer, [(one.begun, one.looked) for one in counting]

    (expected, theirs), fault = run(False), FailsOnce()
    found, ours = run(True, memory=MemorySettings(), callbacks=[fault])
    assert fault.failed == 1 and ours == theirs and any(looked for _, looked in theirs)
    assert tiny.same(tiny.weights_of(found.model), tiny.weights_of(expected.model))


class CountsInItsClass:
    asked = 0

    @classmethod
    def reward(cls, completions, **_) -> list[float]:
        cls.asked += 1
        return [float(len(set(text))) for text in completions]


def test_a_reward_that_is_a_method_of_a_class_does_not_end_a_step_that_runs_again(tmp_path):
    rewards = {"reward_funcs": CountsInItsClass.reward}
    expected = also_trained("GRPO", tmp_path, False, **rewards)
    fault = FailsOnce()
    found = also_trained("GRPO", tmp_path, True, memory=MemorySettings(), callbacks=[fault], **rewards)
    assert fault.failed == 1 and tiny.same(tiny.weights_of(found.model), tiny.weights_of(expected.model))


def test_one_class_for_one_trainer():
    assert with_loops(SFTTrainer) is with_loops(SFTTrainer) and with_loops(SFTTrainer).__name__ == "SCUSFTTrainer"
    assert issubclass(with_loops(SFTTrainer), SFTTrainer) and issubclass(with_loops(SFTTrainer), SCUTrainer)
    assert with_loops(SCUTrainer) is SCUTrainer and with_loops(Trainer) is SCUTrainer
    for wrong in (dict, 3, None):
        with pytest.raises(TypeError, match="a subclass of transformers"):
            with_loops(wrong)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_memory_splits_or_says_why_it_does_not(tmp_path, stock, name, caplog):
    with caplog.at_level(logging.WARNING, logger="scu_trainer"):
        found = trained(name, tmp_path, memory=MemorySettings(token_cap=24))
    assert apart(found, stock[name]) < 1e-5
    chunks = found.micro_batches.loop.statistics.chunks
    said = [record.message for record in caplog.records if "would not give the gradient of the whole" in record.message]
    if name in SPLIT:
        assert chunks > 2 * STEPS and not said
    else:
        assert chunks == 2 * STEPS and len(said) == 1


def test_kto_without_a_divergence_is_split(tmp_path):
    expected, found = (
        trained("KTO", tmp_path, looped, loss_type="apo_zero_unpaired", **given)
        for looped, given in ((False, {}), (True, {"memory": MemorySettings(token_cap=24)}))
    )
    assert found.micro_batches.loop.statistics.chunks > 2 * STEPS and apart(found, expected) < 1e-5


def test_an_encoder_decoder_that_generates(tmp_path):
    """The same weights, figures and texts; where generating for a batch runs out of memory, for fewer rows at once."""

    def run(looped: bool, **given: Any) -> tuple[Trainer, Any]:
        args = Seq2SeqTrainingArguments(
            str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            per_device_eval_batch_size=4, logging_steps=1, learning_rate=1e-3, eval_strategy="steps", eval_steps=2,
            predict_with_generate=True, generation_max_length=9, generation_num_beams=2, save_strategy="no",
            use_cpu=True, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        model, rows = tiny.bart(), tiny.pairs()
        kind = with_loops(Seq2SeqTrainer) if looped else Seq2SeqTrainer
        collator = DataCollatorForSeq2Seq(tokenizer(), model=model)
        trainer = kind(
            model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=collator,
            processing_class=tokenizer(), **given,
        )  # fmt: skip
        trainer.train()
        generate = model.generate

        def for_one_row(input_ids, **others):
            if looped and given and len(input_ids) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return generate(input_ids=input_ids, **others)

        model.generate = for_one_row
        return trainer, trainer.predict(rows)

    (expected, texts), (off, off_texts) = run(False), run(True)
    on, on_texts = run(True, memory=MemorySettings(token_cap=24))
    assert tiny.same(tiny.weights_of(off.model), tiny.weights_of(expected.model)) and logs(off) == logs(expected)
    assert on.micro_batches.loop.statistics.chunks > 2 * STEPS and apart(on, expected) < 1e-5
    assert (off_texts.predictions == texts.predictions).all() and (on_texts.predictions == texts.predictions).all()
    for ours, theirs in zip(logs(on), logs(expected), strict=True):
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_running_out_of_memory_changes_no_gradient(tmp_path, stock, name):
    fault = FailsOnce()
    found = trained(name, tmp_path, memory=MemorySettings(), callbacks=[fault])
    assert fault.failed == 1 and found.micro_batches.loop.statistics.out_of_memory == 1
    assert apart(found, stock[name]) < 1e-5
    # SFT's accuracy is a mean over the parts of a split batch; all other figures are those of what was trained on.
    figures = {key for row in logs(stock[name]) for key in row} - {"mean_token_accuracy"}
    for ours, theirs in zip(logs(found), logs(stock[name]), strict=True):
        for key in figures & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key


class AlwaysFails(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def fail(gradient: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        next(p for p in model.parameters() if p.requires_grad).register_hook(fail)


@pytest.mark.parametrize("name", ["DPO", "Reward"])
def test_pairs_are_never_cut_apart(tmp_path, name):
    together = r"batch 0 and 5 more rows \(\d+ tokens\) do not fit in memory together"
    reason = r"could not be cut: .*fails on few or shorter rows \(ValueError: .*Lower per_device_train_batch"
    with pytest.raises(OutOfMemory, match=f"{together}.*{reason}"):
        trained(name, tmp_path, memory=MemorySettings(), callbacks=[AlwaysFails()])
    (row,) = read_rows(tmp_path / "memory_history.json")
    assert row["reason"].startswith("out of memory at 8 rows") and "retrying it unchanged" in row["reason"]


@pytest.mark.parametrize("name", ["DPO", "Reward"])
def test_pairs_run_whole_where_memory_is_short_and_nothing_else_is_said(tmp_path, stock, name, caplog):
    gauge = FakeGauge(100, 98)
    found = trained(name, tmp_path, memory=MemorySettings(), memory_gauge=gauge)
    assert found.micro_batches.loop.statistics.chunks == 2 * STEPS and apart(found, stock[name]) == 0
    (said,) = [line for line in caplog.messages if line.startswith("step ")]
    assert re.match(
        r"step 1: used 98 % .*, but batches run whole \(.*few or shorter rows.*; if memory runs out, lower", said
    )
    assert read_rows(tmp_path / "memory_history.json") == []


def fails(model: torch.nn.Module, times: int) -> None:
    """As the forward of ``model`` fails that runs out of memory."""
    left = iter(range(times))

    def fail(*_: Any) -> None:
        if next(left, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    model.register_forward_pre_hook(fail)


@pytest.mark.parametrize("name", ["DPO", "Reward"])
def test_pairs_are_never_cut_apart_in_an_evaluation(tmp_path, name):
    held_out = Dataset.from_dict({key: values[:6] for key, values in ROWS[name].items()})
    expected = made(name, tmp_path, False, eval_dataset=held_out).evaluate()
    trainer = made(name, tmp_path, eval_dataset=held_out, memory=MemorySettings())
    fails(trainer.model.model, 1)
    found = trainer.evaluate()
    assert found == pytest.approx({**expected, **{key: found[key] for key in found if TIMES.search(key)}})
    assert trainer.prediction.halving.out_of_memory == 1
    fails(trainer.model.model, 2)
    with pytest.raises(OutOfMemory, match=r"12 rows, which cannot be cut .*Lower per_device_eval_batch_size"):
        trainer.evaluate()


def test_an_evaluation_in_parts_gives_the_loss_of_the_whole(tmp_path):
    """TRL's prediction_step gives the loss no count, unlike the stock one: what it returns is a mean."""
    held_out = Dataset.from_dict({key: values[:6] for key, values in ROWS["SFT"].items()})
    expected = made("SFT", tmp_path, False, eval_dataset=held_out).evaluate()
    trainer = made("SFT", tmp_path, eval_dataset=held_out, memory=MemorySettings())
    fails(trainer.model.model, 1)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert trainer.prediction.halving.out_of_memory == 1


def test_pairs_of_several_ranks_are_not_cut_apart_in_an_evaluation(tmp_path, monkeypatch):
    """No rank can ask its loss alone: the others would have to exchange figures with it."""
    trainer = made("DPO", tmp_path, eval_dataset=Dataset.from_dict(ROWS["DPO"]), memory=MemorySettings())
    inputs = next(iter(trainer.get_eval_dataloader()))
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    fails(trainer.model.model, 2)
    with pytest.raises(OutOfMemory, match=r"16 rows, which cannot be cut \(the code of its loss communicates"):
        trainer.prediction_step(trainer.model, inputs, prediction_loss_only=True)


# -- regularization, safety --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_regularization_measures_and_acts(tmp_path, stock, name):
    found = trained(name, tmp_path, regularization=SCU)
    rows = read_rows(tmp_path / "scu_history.json")
    assert len(rows) == STEPS and all(math.isfinite(row["s"]) for row in rows) and rows[-1]["lambda"] > 0
    assert apart(found, stock[name]) > 0
    assert all("scu/s" in row for row in found.state.log_history if "loss" in row)


class Infinite(TrainerCallback):
    """The gradient of step 2 is."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        weight = next(p for p in model.parameters() if p.requires_grad)
        weight.register_hook(lambda gradient: gradient * math.inf if state.global_step == 1 else gradient)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_without_a_finite_gradient_is_skipped(tmp_path, stock, name):
    found = trained(name, tmp_path, safety=SafetySettings(), callbacks=[Infinite()])
    assert found.nonfinite_guard.skipped_steps == 1
    assert all(bool(torch.isfinite(p).all()) for p in found.model.parameters())
    tokens = [{row["num_tokens"] for row in logs(one) if "num_tokens" in row} for one in (found, stock[name])]
    assert tokens[0] <= tokens[1]  # the search for the value runs rows again, which count once


def test_where_a_batch_is_a_list_the_search_for_a_value_says_so(tmp_path, caplog):
    also_trained("GRPO", tmp_path, True, safety=SafetySettings(), callbacks=[Infinite()])
    assert "the source was not found: the collator returns a list, not a mapping of tensors. " in caplog.text


# -- curriculum --------------------------------------------------------------------------------------------------------


def test_samples_and_their_losses_are_seen_in_sft(tmp_path, stock):
    found = trained("SFT", tmp_path, curriculum=CurriculumSettings("none"))
    assert tiny.same(tiny.weights_of(found.model), tiny.weights_of(stock["SFT"].model))
    assert found.difficulty.observations.tolist() == [1] * len(TEXTS) and not found.curriculum.notices
    assert found.loss_path.reading.exact


REFUSED = {
    "DPO": (DataError, "8 rows of 4 samples.*If samples are pairs of rows"),
    "Reward": (DataError, "8 rows of 4 samples.*If samples are pairs of rows"),
    "KTO": (SettingsError, "train_sampling_strategy: sequential with a curriculum"),
    "ORPO": (ControlError, "noise_guard needs the loss of each row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_no_curriculum_can_act_it_says_so_before_a_step(tmp_path, name):
    error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        trainer = made(name, tmp_path, curriculum=CurriculumSettings("noise_guard"))
        before = tiny.weights_of(trainer.model)
        try:
            trainer.train()
        finally:
            assert trainer.state.global_step == 0 and tiny.same(tiny.weights_of(trainer.model), before)


# -- resume ------------------------------------------------------------------------------------------------------------

ALL = {"memory": MemorySettings(token_cap=24), "regularization": SCU, "safety": SafetySettings()}


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, name):
    whole = trained(name, tmp_path, save_strategy="steps", save_steps=2, **copy.copy(ALL))
    rest = trained(name, tmp_path, resume=str(tmp_path / "checkpoint-2"), **copy.copy(ALL))
    assert tiny.same(tiny.weights_of(rest.model), tiny.weights_of(whole.model))
    assert len(read_rows(tmp_path / "scu_history.json")) == STEPS


class KeepsReference(TrainerCallback):
    """As the warning says, for any trainer of TRL: those of GRPO and RLOO are given no reference model."""

    def __init__(self, trainer: Trainer, name: str = "ref_model") -> None:
        self.trainer, self.name, self.by_step = trainer, name, {}

    def on_save(self, args, state, control, **kwargs):
        self.by_step[state.global_step] = copy.deepcopy(getattr(self.trainer, self.name).state_dict())


@pytest.mark.parametrize("looped", [{}, ALL])
def test_a_resume_says_that_a_reference_model_that_moves_starts_over(tmp_path, looped, caplog):
    """One that TRL has not moved by then starts where it was."""

    def run(folder: Path, sync_steps: int, resume=None, reference=None) -> tuple[Trainer, dict]:
        trainer = made("DPO", folder, save_strategy="steps", save_steps=2, **copy.copy(looped))
        trainer.args.sync_ref_model, trainer.args.ref_model_sync_steps = True, sync_steps
        kept = KeepsReference(trainer)
        trainer.add_callback(SyncRefModelCallback(trainer.ref_model, trainer.accelerator))
        trainer.add_callback(kept)
        if reference is not None:
            trainer.ref_model.load_state_dict(reference)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, kept.by_step

    for sync_steps, starts_over in ((2, True), (3, False)):
        caplog.clear()
        folder = tmp_path / str(sync_steps)
        resume = str(folder / "checkpoint-2")
        whole, by_step = run(folder, sync_steps)
        rest, _ = run(folder, sync_steps, resume)
        said = "does not hold the reference model" in caplog.text
        assert said == ("pass it to trainer.ref_model.load_state_dict before you call train" in caplog.text)
        same = tiny.same(tiny.weights_of(rest.ref_model), tiny.weights_of(whole.ref_model))
        assert (said, same) == (starts_over, not starts_over)
        if starts_over:  # otherwise the reference of step 2 is the one that it has
            rest, _ = run(folder, sync_steps, resume, by_step[2])
        assert tiny.same(tiny.weights_of(rest.ref_model), tiny.weights_of(whole.ref_model))
        assert tiny.same(tiny.weights_of(rest.model), tiny.weights_of(whole.model))


def test_a_resume_says_that_an_average_of_trl_starts_over(tmp_path, caplog):
    """One that begins with the checkpoint's own step is the same."""
    for update_after, starts_over in ((0, True), (2, False)):
        folder, averages = tmp_path / str(update_after), []
        for resume in (None, str(folder / "checkpoint-2")):
            caplog.clear()
            average = BEMACallback(update_freq=1, update_after=update_after)
            trainer = made("SFT", folder, save_strategy="steps", save_steps=2, callbacks=[average])
            trainer.train(resume_from_checkpoint=resume)
            averages.append(tiny.weights_of(average.running_model))
        said = "does not hold the weight average of BEMACallback" in caplog.text
        assert (said, tiny.same(*averages)) == (starts_over, not starts_over)


def test_a_resume_says_that_a_reference_model_that_follows_an_average_starts_over(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(KINDS, "DPO", (bema_for_ref_model.DPOTrainer, DPOConfig))
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        average = bema_for_ref_model.BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)
        runs.append(trained("DPO", tmp_path, resume=resume, save_strategy="steps", save_steps=2, callbacks=[average]))
    assert apart(*runs) > 0 and "the averaged model, and the trained one, whose reference model follows" in caplog.text


def test_a_resume_says_that_a_teacher_that_moves_starts_over(tmp_path, caplog):
    """As of SDPO, unless one says otherwise: it follows the trained model in every step."""
    tiny.small_llama().save_pretrained(tmp_path / "model")

    def run(resume=None, teacher=None, **given: Any) -> tuple[Trainer, dict]:
        own = {"num_generations": 2, "max_completion_length": 6, "save_strategy": "steps", "save_steps": 1, **given}
        args = SDPOConfig(
            str(tmp_path / "run"), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, bf16=False,
            use_cpu=True, report_to="none", disable_tqdm=True, **own,
        )  # fmt: skip
        model, rows = LlamaForCausalLM.from_pretrained(tmp_path / "model"), Dataset.from_dict(PROMPTS)
        trainer = with_loops(SDPOTrainer)(
            model=model, reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer()
        )
        kept = KeepsReference(trainer, "teacher_model")
        trainer.add_callback(kept)
        if teacher is not None:
            trainer.teacher_model.load_state_dict(teacher)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, kept.by_step

    whole, by_step = run()
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    rest, _ = run(checkpoint)
    assert "does not hold the teacher" in caplog.text and "trainer.teacher_model.load_state_dict" in caplog.text
    assert not tiny.same(rest.teacher_model.state_dict(), whole.teacher_model.state_dict())
    exact, _ = run(checkpoint, by_step[2])
    for name in ("teacher_model", "model"):
        assert tiny.same(getattr(exact, name).state_dict(), getattr(whole, name).state_dict())
    caplog.clear()
    run(checkpoint, teacher_model_kind="base")
    assert "does not hold the teacher" not in caplog.text


@pytest.mark.parametrize("looped", [{}, ALL])
def test_a_resume_says_that_it_generates_again_for_steps_that_had_their_texts(tmp_path, looped, caplog, monkeypatch):
    kind, config, own, rows = ALSO_OFF["GRPO"]
    own = {**own, "gradient_accumulation_steps": 2, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    monkeypatch.setitem(ALSO_OFF, "GRPO", (kind, config, own, rows))
    whole = also_trained("GRPO", tmp_path, True, **copy.copy(looped))
    for step, is_exact in ((2, True), (1, False)):  # which writes the later one again
        caplog.clear()
        rest = also_trained("GRPO", tmp_path, True, str(tmp_path / f"checkpoint-{step}"), **copy.copy(looped))
        assert ("from a checkpoint whose step is a multiple of 2, the" in caplog.text) is not is_exact
        assert tiny.same(tiny.weights_of(rest.model), tiny.weights_of(whole.model)) is is_exact


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_the_prompts_of_a_later_epoch_come_in_the_order_of_before(tmp_path, name, caplog, monkeypatch):
    """TRL's sampler draws it from a generator that no checkpoint holds. An epoch has two steps."""
    kind, config, own, _ = ALSO_OFF[name]
    own, rows = {**own, "save_strategy": "steps", "save_steps": 1}, {"prompt": list("abcde")}
    monkeypatch.setitem(ALSO_OFF, name, (kind, config, own, rows))
    for looped in ({"safety": SafetySettings()}, {}):
        whole = also_trained(name, tmp_path, True, **looped)
        for step, said in ((1, False), (2, not looped)):
            caplog.clear()
            rest = also_trained(name, tmp_path, True, str(tmp_path / f"checkpoint-{step}"), **looped)
            assert ("RepeatSampler: the rows of this epoch come in another order than before" in caplog.text) is said
            assert tiny.same(tiny.weights_of(rest.model), tiny.weights_of(whole.model)) is not said


# -- a user's own ------------------------------------------------------------------------------------------------------


class Mine(Trainer):
    """Overrides what people override."""

    def __init__(self, *args: Any, factor: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor, self.steps_seen, self.logged = factor, 0, 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (self.factor * loss, outputs) if return_outputs else self.factor * loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.steps_seen += 1
        return super().training_step(model, inputs, num_items_in_batch)

    def get_train_dataloader(self):
        return super().get_train_dataloader()

    def log(self, logs, start_time=None):
        self.logged += 1
        super().log({**logs, "mine": 1.0}, start_time)


def mine(kind: type[Trainer], folder: Path, **given: Any) -> Trainer:
    args = tiny.arguments(folder, gradient_accumulation_steps=2, logging_steps=1)
    rows = {"train_dataset": tiny.UnevenRows(32), "data_collator": tiny.pad}
    trainer = kind(model=tiny.small_llama(), args=args, factor=0.5, **rows, **given)
    trainer.train()
    return trainer


def test_a_trainer_of_ones_own(tmp_path):
    expected = mine(Mine, tmp_path / "stock")
    off = mine(with_loops(Mine), tmp_path / "off")
    assert tiny.same(tiny.weights_of(off.model), tiny.weights_of(expected.model)) and logs(off) == logs(expected)
    assert (off.steps_seen, off.logged) == (expected.steps_seen, expected.logged)
    on = mine(with_loops(Mine), tmp_path / "on", memory=MemorySettings(token_cap=32), safety=SafetySettings())
    assert apart(on, expected) < 1e-5 and on.micro_batches.loop.statistics.chunks > 12
    assert all(row["mine"] == 1.0 for row in on.state.log_history)
    survived = mine(with_loops(Mine), tmp_path / "fault", memory=MemorySettings(token_cap=32), callbacks=[FailsOnce()])
    assert apart(survived, expected) < 1e-5 and survived.micro_batches.loop.statistics.out_of_memory == 1
