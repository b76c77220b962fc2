"""The GRU over words in the loop: the command, the three loops, micro-batches, faults, resume, evaluation, refusals."""

from __future__ import annotations

import json
import random

import pytest
import torch

from scu_trainer.cli import configuration
from scu_trainer.cli import train as command
from scu_trainer.cli.evaluation import eval as evaluation
from scu_trainer.data import Collator
from scu_trainer.errors import ModelError, SettingsError
from scu_trainer.models.gru import CadenceConfig, CadenceForCausalLM
from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings
from scu_trainer.train.evaluation.scoring import score_documents
from scu_trainer.train.tasks.words import WordTask
from tests import tiny
from tests.faults import fail_above_tokens, fail_in_backward
from tests.tiny import Examples, same, trained, weights_of
from tests.train.test_resume import StopAt

WORDS, CATEGORIES = 30, 4
COLLATE = Collator(0, carry=("sample_index", "category_ids"))


def cadence(seed: int = 0, **changes) -> CadenceForCausalLM:
    torch.manual_seed(seed)
    sizes = {"embedding_size": 12, "category_embedding_size": 6, "hidden_size": 16, "num_hidden_layers": 2}
    chance = {"dropout": 0.0, "category_dropout": 0.0}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    names = [f"c{n}" for n in range(CATEGORIES)]
    return CadenceForCausalLM(
        CadenceConfig(vocab_size=WORDS, category_names=names, **{**sizes, **chance, **tokens, **changes})
    )


def sequences(count: int = 24, seed: int = 0) -> Examples:
    """Rows of 4 to 13 words; each category has its own order of words."""
    chance, rows = random.Random(seed), []
    for number in range(count):
        category, length = number % CATEGORIES, chance.randint(4, 13)
        start = chance.randrange(WORDS - 4)
        ids = [2, *(4 + (start + (2 * category + 1) * n) % (WORDS - 4) for n in range(length - 1))]
        rows.append({"input_ids": ids, "labels": [-100, *ids[1:]], "length": length, "category_ids": category})
    return Examples(rows)


def run(folder, model=None, **changes):
    changes = {"data_collator": COLLATE, "dataset": sequences(), "optim": "sgd", "learning_rate": 0.3, **changes}
    return trained(model or cadence(), folder, **changes)


def close(first, second, bound: float = 1e-6) -> bool:
    return all((first[name] - weight).abs().max() <= bound for name, weight in second.items())


# -- one step, whole or in pieces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked_loss", ["never", "always"])
def test_a_step_in_chunks_is_the_whole_step(tmp_path, chunked_loss):
    window = {"gradient_accumulation_steps": 2, "max_steps": 2}
    whole = weights_of(run(tmp_path / "stock", **window).model)
    memory = MemorySettings(token_cap=26, chunked_loss=chunked_loss)
    model = cadence()
    with fail_above_tokens(model, 10**6) as tried:
        pieces = run(tmp_path / "pieces", model, memory=memory, **window)
    assert 0 < max(tried[-4:]) <= 26
    assert close(weights_of(pieces.model), whole)


def test_out_of_memory_changes_nothing_but_the_chunks(tmp_path):
    whole = weights_of(run(tmp_path / "stock", max_steps=3).model)
    model = cadence()
    with fail_above_tokens(model, 30) as tried:
        survived = run(tmp_path / "small", model, memory=MemorySettings(), max_steps=3)
    assert max(tried) > 30 and close(weights_of(survived.model), whole)
    assert survived.micro_batches.loop.statistics.out_of_memory > 0


def test_a_fault_in_mid_backward_with_dropout_is_no_fault(tmp_path):
    settings = {"memory": MemorySettings(), "max_steps": 3}
    whole = run(tmp_path / "whole", cadence(dropout=0.3, category_dropout=0.3), **settings)
    model = cadence(dropout=0.3, category_dropout=0.3)
    with fail_in_backward(model.model.layers[0].weight_hh_l0, call=1) as fault:
        again = run(tmp_path / "fault", model, **settings)
    assert fault.calls > 3
    assert again.micro_batches.loop.statistics.out_of_memory == 1 and again.state.global_step == 3
    assert close(weights_of(again.model), weights_of(whole.model), bound=0.2)  # other micro-batches draw other masks


def test_all_loops_off_is_the_stock_trainer(tmp_path):
    from transformers import Trainer

    stock = Trainer(
        cadence(),
        tiny.arguments(tmp_path / "stock", optim="sgd", learning_rate=0.3),
        train_dataset=sequences(),
        data_collator=COLLATE,
    )
    stock.train()
    assert same(weights_of(stock.model), weights_of(run(tmp_path / "ours").model))


# -- the loops ---------------------------------------------------------------------------------------------------------


def test_losses_of_samples_are_exact(tmp_path):
    rows = sequences(8)
    settings = {"curriculum": CurriculumSettings(curriculum="token_budget"), "learning_rate": 0.0}
    trainer = run(tmp_path, dataset=rows, num_train_epochs=2, max_steps=-1, **settings)
    with torch.no_grad():
        expected = [float(trainer.model.eval()(**COLLATE([rows[number]])).loss) for number in range(8)]
    assert trainer.difficulty.scores.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_regularizer_holds_s(tmp_path):
    settings = RegularizationSettings(target_s=0.05, sigma=0.5)
    trainer = run(tmp_path, regularization=settings, max_steps=60, optim="adamw_torch", learning_rate=1e-2)
    rows = read_rows(tmp_path / "scu_history.json")
    assert rows[-1]["s_ema"] == pytest.approx(0.05, rel=0.25) and trainer.state.global_step == 60


LOOPS = {
    "regularization": RegularizationSettings(target_s=0.05, sigma=0.5),
    "memory": MemorySettings(token_cap=26),
    "curriculum": CurriculumSettings(curriculum="token_budget"),
}


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path):
    settings = {**LOOPS, "optim": "adamw_torch", "learning_rate": 1e-2, "num_train_epochs": 3, "max_steps": -1}
    model = {"dropout": 0.2, "category_dropout": 0.2}
    whole = run(tmp_path / "whole", cadence(**model), **settings)
    run(tmp_path / "cut", cadence(**model), callbacks=[StopAt(8)], **settings)
    resumed = run(tmp_path / "cut", cadence(**model), resume=True, **settings)
    assert resumed.state.global_step == whole.state.global_step > 8
    assert same(weights_of(resumed.model), weights_of(whole.model))


# -- the category ------------------------------------------------------------------------------------------------------


def test_what_only_the_category_tells_is_learned(tmp_path):
    """One word follows per category and nothing else does: without it, 4 words are equally likely."""
    rows = Examples(
        {"input_ids": [2, 5 + c, 3], "labels": [-100, 5 + c, 3], "length": 3, "category_ids": c, "document": c}
        for c in list(range(CATEGORIES)) * 6
    )
    settings = {"dataset": rows, "optim": "adamw_torch", "learning_rate": 3e-2, "max_steps": 80}
    known = run(tmp_path / "with", cadence(initializer_range=0.5), **settings)
    hidden = Collator(0)
    unknown = run(tmp_path / "without", cadence(initializer_range=0.5), **{**settings, "data_collator": hidden})
    held_out = Table(rows)
    with_category, without = (
        score_documents(trainer.model, held_out, collate).bpt
        for trainer, collate in ((known, COLLATE), (unknown, hidden))
    )
    assert with_category < 0.1 and without == pytest.approx(1.0, abs=0.1)  # log2(4) bits for one of two words


class Table(Examples):
    """With columns, as datasets have them."""

    def __getitem__(self, key):
        return [row[key] for row in self.rows] if isinstance(key, str) else super().__getitem__(key)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def farm(tmp_path_factory):
    """A file of 120 texts in two categories."""
    path = tmp_path_factory.mktemp("farm") / "farm.jsonl"
    sounds = {"cow": "moo", "dog": "woof"}
    rows = [
        {"text": f"my {animal} is number {n % 7} and it says {sounds[animal]} all day", "category": animal}
        for n in range(60)
        for animal in sounds
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(farm, folder, **changes) -> list[str]:
    sizes = {"embedding_size": 16, "category_embedding_size": 8, "gru_hidden_size": 24, "min_word_count": 1}
    settings = {
        **{"task": "word-generation", "dataset": farm, "output_dir": folder, "use_cpu": True, "report_to": "none"},
        **{**sizes, "block_size": 16, "num_train_epochs": 8, "learning_rate": 2e-2, "validation_split_percentage": 10},
        "per_device_train_batch_size": 4,
        "gru_dropout": 0.0,
        **{"mixed_precision": "no", "disable_tqdm": True, **changes},
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def farm_run(farm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("farm_run") / "run"
    loops = {"scu": True, "scu_target_s": 0.9, "scu_sigma": 1.0, "curriculum": "token_budget", "memory_control": True}
    assert command.main(flags(farm, folder, **loops)) == 0
    return folder


def test_the_command_trains_with_all_loops(farm_run):
    metrics = read_json(farm_run / "scu_metrics.json")
    assert read_json(farm_run / "run.json")["status"] == "finished"
    assert read_rows(farm_run / "scu_history.json") and (farm_run / "tokenizer.json").is_file()
    config = read_json(farm_run / "config.json")
    assert config["model_type"] == "cadence" and sorted(config["category_names"]) == ["<unknown>", "cow", "dog"]
    assert (farm_run / "gru.py").is_file() and metrics


def test_the_saved_model_speaks_of_its_category(farm_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(farm_run), AutoTokenizer.from_pretrained(farm_run)
    for name, sound in (("cow", "moo"), ("dog", "woof")):
        category = torch.tensor([model.config.category_names.index(name)])
        prompt = tokenizer("my", return_tensors="pt")
        ids = model.generate(**prompt, category_ids=category, max_new_tokens=20, do_sample=False)
        text = tokenizer.decode(ids[0], skip_special_tokens=True)
        assert text.startswith(f"my {name} is number") and text.endswith(f"says {sound} all day"), text


def test_eval_scores_the_texts_that_were_held_out(farm_run, capsys):
    assert evaluation.main([str(farm_run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["unit"], found["documents"], found["tokens"]) == ("word", 12, 12 * 12)
    assert found["fingerprint"] == read_json(farm_run / "training_config.json")["data"]["fingerprint"]
    assert found["model"]["bpt"]["value"] == pytest.approx(
        read_json(farm_run / "scu_metrics.json")["held_out_bpt_after"]["value"], rel=1e-4
    ), found


def test_training_goes_on_from_a_trained_model_and_its_words(farm, farm_run, tmp_path):
    again = flags(farm, tmp_path / "again", model_name_or_path=farm_run, num_train_epochs=1, lora_r=2, tuning="lora")
    assert command.main(again) == 0
    assert (tmp_path / "again" / "adapter_config.json").is_file()
    task, job = WordTask(), configuration.read_job(None, flags(farm, tmp_path / "o", model_name_or_path=farm_run))
    from rich.console import Console

    parts = task.load(job, Console(quiet=True))
    assert parts.processor.get_vocab() == json.loads((farm_run / "tokenizer.json").read_text())["model"]["vocab"]
    assert task.example_inputs(parts)["category_ids"].shape == (1,)


def test_activations_are_checkpointed_on_request(farm, tmp_path, capsys):
    assert command.main(flags(farm, tmp_path, num_train_epochs=1, checkpoint_every_layer=True, gru_layers=2)) == 0
    assert "kept at the borders of 2 blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuning": "qlora"}, "a GRU has almost none; use tuning: full or lora"),
        ({"tuning": "lora"}, "this one starts from scratch; use tuning: full, or give model_name_or_path"),
        ({"tuning": "lora", "model_name_or_path": "x", "lora_target_modules": "layers.0"}, "fused kernel"),
        ({"device_map": "auto"}, "device_map places large language models"),
        ({"packing": True}, "packing has no effect on task: word-generation"),
    ],
)
def test_what_a_gru_cannot_do_is_refused_with_the_reason(farm, tmp_path, changes, message):
    with pytest.raises(SettingsError) as error:
        configuration.read_job(None, flags(farm, tmp_path, **changes)).check()
    assert message in str(error.value)


def test_a_model_of_another_kind_is_refused(farm, tmp_path):
    from rich.console import Console

    other = tiny.saved_llama(tmp_path / "llama")
    job = configuration.read_job(None, flags(farm, tmp_path / "o", model_name_or_path=other))
    with pytest.raises(ModelError, match="is a llama model, but task: word-generation trains cadence models"):
        WordTask().load(job, Console(quiet=True))


@pytest.mark.parametrize("mode", ["tiny", "standard", "extended"])
def test_each_mode_makes_a_model_of_its_size(farm, tmp_path, mode):
    from rich.console import Console

    words = [word for word in flags(farm, tmp_path, mode=mode)]
    sized = ("--embedding_size", "--category_embedding_size", "--gru_hidden_size", "--min_word_count", "--block_size")
    for name in sized:
        place = words.index(name)
        del words[place : place + 2]
    job = configuration.read_job(None, words)
    model = WordTask().load(job, Console(quiet=True)).model
    expected = {"tiny": (32, 16, 64, 1), "standard": (128, 64, 256, 1), "extended": (256, 128, 512, 2)}[mode]
    config = model.config
    sizes = (config.embedding_size, config.category_embedding_size, config.hidden_size, config.num_hidden_layers)
    assert sizes == expected
