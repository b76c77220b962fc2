"""Held-out prompts that are answered on the way: which, by which weights, and that training does not notice."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model

from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.models.asking import evaluating
from scu_trainer.run_files import read_rows
from scu_trainer.settings import MemorySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.evaluation.answers import (
    NOT_LEARNED,
    TEXT_PROMPT_TOKENS,
    Prompt,
    answered,
    spread_prompts,
    stop_tokens,
)
from scu_trainer.train.loop import Loop
from scu_trainer.train.session import samples
from scu_trainer.train.session.samples import Samples
from tests import processes
from tests.faults import oom
from tests.tiny import Rows, llama, same, trained, weights_of
from tests.train.test_optimizers import StopAt

X = NOT_LEARNED


@pytest.fixture(scope="module")
def tokenizer():
    return embedded_tokenizer(default_cache_dir(None))


def row(token_ids, labels=None, **more):
    return {"input_ids": token_ids, **({} if labels is None else {"labels": labels}), **more}


def test_a_prompt_is_what_stands_before_the_first_learned_token():
    assert spread_prompts([row([5, 6, 7, 8, 9], [X, X, X, 8, 9])], 1, 99) == [Prompt(0, (5, 6, 7), (8, 9))]


def test_of_several_turns_the_first_answer_is_the_reference():
    assert spread_prompts([row([5, 6, 7, 8, 9], [X, X, 7, X, 9])], 1, 99) == [Prompt(0, (5, 6), (7,))]


@pytest.mark.parametrize(("count", "prompt"), [(4, 2), (100, TEXT_PROMPT_TOKENS)])
def test_of_a_text_that_is_learned_whole_the_beginning_is_the_prompt(count, prompt):
    token_ids = list(range(count))
    (found,) = spread_prompts([row(token_ids, [X, *token_ids[1:]])], 1, 99)
    assert found == Prompt(0, tuple(token_ids[:prompt]), tuple(token_ids[prompt:]))
    assert spread_prompts([row(token_ids)], 1, 99) == [found]


def test_prompts_are_spread_and_rows_without_one_are_left_out():
    rows = [row([i, 1, 2, 3], [X, X, 2, 3]) for i in range(30)]
    assert [prompt.row for prompt in spread_prompts(rows, 3, 99)] == [0, 10, 20]
    rows[10] = row([1, 2], [X, X])
    rows[20] = row([1] * 100, [X] * 99 + [1])
    found = [prompt.row for prompt in spread_prompts(rows, 3, 98)]
    assert len(found) == 3 and not {10, 20} & {*found} and len(spread_prompts(rows[:2], 3, 98)) == 2


def test_a_text_that_goes_on_in_the_next_row_is_begun_at_its_beginning():
    rows = [row([i, 1, 2, 3], document=i // 10) for i in range(20)]
    assert [prompt.row for prompt in spread_prompts(rows, 2, 99)] == [0, 10]


def sampler(tokenizer, **changes) -> Samples:
    return Samples(Rows(8, seed=4), tokenizer, **{"count": 2, "max_new_tokens": 5, **changes})


def train(folder, *loops, **changes):
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": Rows(8, seed=4), "memory": MemorySettings()}
    return trained(llama(layers=1, attention_dropout=0.5), folder, callbacks=list(loops), **{**options, **changes})


def test_training_does_not_notice(tokenizer, tmp_path):
    plain, sampled = train(tmp_path / "a"), train(tmp_path / "b", sampler(tokenizer))
    assert same(weights_of(sampled.model), weights_of(plain.model))
    rows = read_rows(tmp_path / "b" / "samples.json")
    assert [one["step"] for one in rows] == [0, 2, 4, 6]
    assert all(len(one["samples"]) == 2 for one in rows)
    assert rows[0]["samples"][0]["answer"] != rows[-1]["samples"][0]["answer"]


def test_a_resumed_run_answers_as_an_uninterrupted_one(tokenizer, tmp_path):
    train(tmp_path / "whole", sampler(tokenizer))
    train(tmp_path / "parts", sampler(tokenizer), StopAt(3))
    train(tmp_path / "parts", sampler(tokenizer), resume=True)
    whole, parts = (read_rows(tmp_path / name / "samples.json") for name in ("whole", "parts"))
    assert [one for one in parts if one["step"] != 3] == whole  # the interrupted one answered at its end, too


def test_the_best_weights_answer_last(tokenizer, tmp_path):
    best = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    train(tmp_path, sampler(tokenizer), **best)
    rows = read_rows(tmp_path / "samples.json")
    assert [one["step"] for one in rows] == [0, 2, 4, 6, 6]
    assert rows[-1]["samples"] == rows[1]["samples"] != rows[-2]["samples"]  # the highest loss counts as best: step 2


def test_it_answers_as_an_evaluation_would(tokenizer, tmp_path, monkeypatch):
    class Average(Loop):
        inside = False

        @contextlib.contextmanager
        def evaluation(self):
            self.inside = True
            yield
            self.inside = False

    average, seen = Average(), []

    def watched(model, *words):
        seen.append((average.inside, model.training, torch.is_grad_enabled()))
        return answered(model, *words)

    monkeypatch.setattr(samples, "answered", watched)
    train(tmp_path, average, sampler(tokenizer))
    assert set(seen) == {(True, False, False)}


def test_modules_are_in_their_modes_again():
    model = llama().train()
    model.lm_head.eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module for module in model.modules() if not module.training] == [model.lm_head]


def test_without_memory_for_them_the_run_goes_on_and_says_so(tokenizer, tmp_path, monkeypatch):
    def fails(model, *words):
        if len(calls := model.__dict__.setdefault("calls", [])) < 1:
            calls.append(1)
            raise oom()
        return answered(model, *words)

    monkeypatch.setattr(samples, "answered", fails)
    loop = sampler(tokenizer)
    plain, sampled = train(tmp_path / "a"), train(tmp_path / "b", loop)
    assert same(weights_of(sampled.model), weights_of(plain.model))
    assert loop.notices == ["no samples were taken at step 0: not enough memory"]
    assert [one["step"] for one in read_rows(tmp_path / "b" / "samples.json")] == [2, 4, 6]


def test_other_errors_stay_errors(tokenizer, tmp_path, monkeypatch):
    def fails(*words):
        raise RuntimeError("no memory was short here")

    monkeypatch.setattr(samples, "answered", fails)
    with pytest.raises(RuntimeError, match="no memory was short"):
        train(tmp_path, sampler(tokenizer))


def test_an_answer_ends_where_the_reference_does(tokenizer):
    model = llama()
    model.generation_config.eos_token_id = [7]
    end_of_turn = tokenizer.all_special_ids[-1]
    assert stop_tokens(model, tokenizer, (5, end_of_turn, 6)) == sorted({7, tokenizer.eos_token_id, end_of_turn})
    assert stop_tokens(model, tokenizer, (end_of_turn, 5, 6, 6)) == sorted({7, tokenizer.eos_token_id})
    first, second, *_ = answered(model, tokenizer, [3, 4], [], 6)
    assert answered(model, tokenizer, [3, 4], [second], 6) == ([first] if second != first else [])


def test_no_prompts_are_said(tokenizer, tmp_path):
    loop = Samples([row([1, 2], [X, X])], tokenizer, 2, 5)
    assert loop.opening_lines() == ["samples: no held-out row has a prompt of 512 tokens or less; none are taken"]
    train(tmp_path, loop)
    assert read_rows(tmp_path / "samples.json") == [] and loop.lines({}) == []


def test_where_a_learned_prompt_would_come_again_at_every_word_none_are_made(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.1")
    loop, prompt = sampler(tokenizer), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    trained(get_peft_model(llama(layers=1), prompt), tmp_path, callbacks=[loop], max_steps=1)
    assert read_rows(tmp_path / "samples.json") == [] and loop.lines({}) == []
    (line,) = loop.opening_lines()
    assert line.startswith("samples: none are made, because peft ") and "99.1 or later: pip install" in line


# -- two ranks; this file is also the program that both execute --------------------------------------------------------


def main(folder: Path) -> None:
    loop = sampler(embedded_tokenizer(default_cache_dir(None)))
    trainer = train(folder, loop, efficiency=EfficiencySettings(ema_decay=0.9), ddp_timeout=60)
    torch.save(weights_of(trainer.model), folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_of_two_ranks_the_first_answers(tmp_path):
    done = processes.run([__file__, tmp_path], ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert same(first, second)
    assert [one["step"] for one in read_rows(tmp_path / "samples.json")] == [0, 2, 4, 6]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
