"""Checks one by one: what no command line can bring about here, and the arithmetic behind the others."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import datasets
import numpy
import pytest
import torch
from transformers import TrainingArguments

from scu_trainer.cli import configuration
from scu_trainer.data.samples import PreparedSamples, SampleStatistics
from scu_trainer.data.statistics import DataStatistics
from scu_trainer.errors import RequirementError, UserError
from scu_trainer.models.loading.dispatch import FreeMemory
from scu_trainer.train.job import checks
from scu_trainer.train.job.job import checkpoint_bytes
from scu_trainer.train.preflight import (
    CHECKS,
    before_training,
    classes,
    columns,
    counts,
    length,
    optimization,
    pitfalls,
    plan,
    room,
    rows,
    surroundings,
    tokens,
    weights,
)
from scu_trainer.train.preflight.finding import percent
from scu_trainer.train.step.distributed.sharded import weight_bytes
from tests import tiny
from tests.train.seeded_mistakes import MISTAKES

MARKS = tokens.SpecialTokens(frozenset({1}), start=0, unknown=5)
DIRECTLY = {
    "updates-round-away",
    "epochs-ignored",
    "few-inodes",
    "labels-out-of-range",
    "memory-nearly-full",
    "more-threads-than-cores",
    "no-wandb-login",
    "nothing-trained",
    "quantized-trained",
    "tokens-out-of-range",
    "tokens-unknown",
}
"""Checks that are tried here and not by a seeded mistake."""


def job_of(*words: str, **flags):
    return configuration.read_job(
        None,
        ["--use_cpu", "true", *words, *(word for name, value in flags.items() for word in (f"--{name}", str(value)))],
    )


def ids(findings) -> list[str]:
    return [finding.check for finding in findings]


def token_rows(*documents: list[int], learned=None) -> datasets.Dataset:
    """One row per document. ``learned``: of each token; default: all."""
    labels = [[t if learned is None or learned(t) else -100 for t in d] for d in documents]
    return datasets.Dataset.from_dict(
        {"input_ids": documents, "labels": labels, "length": [len(d) for d in documents]},
        features=datasets.Features(
            {
                "input_ids": datasets.List(datasets.Value("int32")),
                "labels": datasets.List(datasets.Value("int32")),
                "length": datasets.Value("int32"),
            }
        ),
    )


def test_every_check_is_tried():
    plans = {"plan-of-steps", "plan-of-rows"}
    assert {mistake.expected for mistake in MISTAKES if not mistake.refused} | DIRECTLY | plans == set(CHECKS)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--auto_find_batch_size", "true"], "set auto_find_batch_size: false"),
        (["--optim", "galore_adamw_layerwise", "--optim_target_modules", "all-linear"], "during backward"),
        (["--batch_mode", "logical", "--max_batch_size", "64"], "64 exceeds per_device_train_batch_size 8"),
        (["--use_liger_kernel", "true"], "use_liger_kernel has kernels for GPUs only"),
        (["--use_cache", "true"], "lets packed documents see each other"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, list) else "",
)
def test_what_training_refuses_by_its_settings_is_refused_before_anything_is_loaded(words, text):
    with pytest.raises(UserError, match=text):
        job_of(*words).check()


def test_a_guard_that_deepspeed_leaves_no_place_for_is_refused_then_too(monkeypatch):
    """By its words alone: to ask for DeepSpeed starts a process group."""
    monkeypatch.setattr("scu_trainer.train.job.job.uses_deepspeed", lambda training: True)
    with pytest.raises(UserError, match="spike_guard: off, or drop DeepSpeed"):
        job_of("--spike_guard", "skip").check()


def test_several_gpus_are_no_reason_before_a_model_is_there(monkeypatch):
    """It may lie on all of them, and a comparison gives each run one."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda arguments: 2))
    job_of().check()


def test_without_its_package_liger_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(checks, "installed_version", lambda name: None)
    with pytest.raises(RequirementError, match="pip install liger-kernel"):
        checks._check_liger(SimpleNamespace(use_liger_kernel=True), "cuda")


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_tokens_are_counted():
    facts = tokens.scan(token_rows([0, 7, 8, 1], [0, 0, 9, 1], [0, 7, 8, 1], [5, 5, 1], learned=lambda t: t > 5), MARKS)
    assert (facts.rows, facts.tokens, facts.learned, facts.largest_id) == (4, 15, 5, 9)
    assert (facts.ends, facts.ends_learned, facts.unknown, facts.doubled_starts) == (4, 0, 2, 1)
    assert (facts.documents, facts.repeated) == (4, 1)
    assert facts.sample_phrase() == "of 4 rows"


def test_documents_go_on_over_the_borders_of_rows():
    facts = tokens.scan(token_rows([7, 8, 9], [1, 7, 8], [9, 1, 4]), MARKS)
    assert (facts.documents, facts.repeated) == (2, 1)
    assert [example.tolist() for example in facts.examples] == [[7, 8, 9, 1]] * 2


def test_of_large_data_pieces_evenly_apart_are_looked_at(monkeypatch):
    monkeypatch.setattr(tokens, "BLOCK_ROWS", 2)
    monkeypatch.setattr(tokens, "MOST_TOKENS", 12)
    facts = tokens.scan(token_rows(*([number, number, 1] for number in range(10, 22))), MARKS)
    assert (facts.rows, facts.all_rows, facts.largest_id) == (4, 12, 21)
    assert facts.sample_phrase() == "in a sample of 4 rows of 12"


def test_the_first_documents_alone_are_compared(monkeypatch):
    monkeypatch.setattr(tokens, "MOST_DOCUMENTS", 3)
    assert tokens.scan(token_rows(*[[7, 1]] * 9), MARKS).documents == 3


def test_of_a_stream_the_first_rows_are_looked_at():
    rows_read = []

    def stream():
        for number in range(1000):
            rows_read.append(number)
            yield {"input_ids": [7, 1], "labels": [7, 1]}

    facts = tokens.scan(datasets.IterableDataset.from_generator(stream), MARKS)
    assert facts.rows == tokens.STREAMED_ROWS and len(rows_read) <= tokens.STREAMED_ROWS + 1
    assert facts.sample_phrase() == f"in a sample of {tokens.STREAMED_ROWS} rows"


def test_tokens_without_an_embedding_and_unknown_ones_are_found():
    data = SimpleNamespace(statistics=DataStatistics(documents=1))
    parts = SimpleNamespace(model=tiny.llama(), processor=range(tiny.VOCAB), data=data)
    facts = tokens.scan(token_rows([5, 5, tiny.VOCAB, 1], [1, 1]), MARKS)
    assert ids(rows.before_training(job_of(), parts, facts)) == ["tokens-out-of-range", "tokens-unknown"]
    facts.largest_id, facts.unknown = tiny.VOCAB - 1, 0
    assert ids(rows.before_training(job_of(), parts, facts)) == []


@pytest.mark.parametrize(
    ("documents", "run_tokens"),
    [
        ([[0] + [7] * 127 + [8]], 0),
        ([[0] + [7] * 128 + [8]], 128),
        ([[7] * 64] * 3, 192),
        ([[9, 7] + [8, 7] * 100], 0),
        ([[2] * 500], 0),  # padding, which is not learned
    ],
)
def test_stretches_of_one_token_are_counted_over_the_borders_of_rows(documents, run_tokens):
    facts = tokens.scan(token_rows(*documents, learned=lambda t: t != 2), MARKS)
    assert facts.run_tokens == run_tokens
    assert (facts.longest_run == (run_tokens, 7)) == bool(run_tokens)


@pytest.mark.parametrize(("documents", "expected"), [(40, ["documents-repeated"]), (26, [])])
def test_turns_that_have_an_end_of_their_own_are_no_documents(documents, expected):
    """A system prompt stands in every conversation."""
    facts = tokens.scan(token_rows(*([7, 8, 1] if n % 2 else [7, 9 + n, 1] for n in range(40))), MARKS)
    data = SimpleNamespace(statistics=DataStatistics(documents=documents))
    parts = SimpleNamespace(model=tiny.llama(), processor=Decoder(), data=data)
    assert ids(rows.before_training(job_of(), parts, facts)) == expected


class Decoder:
    def __len__(self) -> int:
        return tiny.VOCAB

    def decode(self, ids, skip_special_tokens: bool) -> str:
        return "words and " * len(ids)


def test_one_token_for_all_is_neither_unknown_nor_a_start():
    tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=1, bos_token_id=1, unk_token_id=1)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[1, 4]))
    assert rows.special_tokens_of(tokenizer, model) == tokens.SpecialTokens(frozenset({1, 4}), None, None)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("/data/a b/c.txt and more", None),
        ("https://example.org/a?b=c", "paths or addresses"),
        ("cats/12.jpg", "paths or addresses"),
        ("12.5", "numbers"),
        ("12 monkeys", None),
        ('{"messages": [{"role": "user"}]}', "conversations as JSON"),
        ('{"name": "a", "size": 3}', None),
        ("<html><body>text</body></html>", None),
    ],
)
def test_what_is_no_text(text, kind):
    assert [name for name, belongs in rows.KINDS.items() if belongs(text)] == ([kind] if kind else [])


# -- classes -----------------------------------------------------------------------------------------------------------


class Labelled(list):
    """Rows with ``labels`` as an array, as stored samples have them."""

    @property
    def labels(self):
        return numpy.array([row["labels"] for row in self])


def samples(labels: list[int], pixels=None) -> PreparedSamples:
    found = Labelled({"labels": label, **({} if pixels is None else {"pixel_values": pixels})} for label in labels)
    counts_by_class = {str(label): labels.count(label) for label in set(labels)}
    return PreparedSamples(found, None, SampleStatistics(per_class=counts_by_class), "", ["0", "1", "2"])


def test_labels_that_the_model_does_not_have_are_found():
    parts = SimpleNamespace(model=tiny.vit(), data=samples([0, 1, 2, 3, -1] * 2))
    finding = next(classes.before_training(job_of(), parts))
    assert finding.check == "labels-out-of-range" and "4 training labels such as 3" in finding.what
    assert ids(classes.before_training(job_of(), SimpleNamespace(model=tiny.vit(), data=samples([0, 1, 2])))) == []


@pytest.mark.parametrize(("pixels", "expected"), [((0, 0), True), ((0, 2), True), ((0, 3), False), ((250, 255), False)])
def test_pictures_of_one_value(pixels, expected):
    data = samples([0, 1] * 20, numpy.array(pixels, dtype=numpy.uint8))
    found = ids(classes.before_training(job_of(), SimpleNamespace(model=tiny.vit(), data=data)))
    assert found == (["inputs-constant"] if expected else [])


# -- weights -----------------------------------------------------------------------------------------------------------


def test_a_frozen_model_and_quantized_weights_are_found():
    job, model = job_of(tuning="full", learning_rate=1e-4), tiny.llama()
    assert ids(weights.before_training(job, model)) == []
    model.requires_grad_(False)
    assert ids(weights.before_training(job, model)) == ["nothing-trained"]
    model.is_quantized = True
    assert ids(weights.before_training(job, model)) == ["quantized-trained"]


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("q_prj", ["optim-target-missing"]),
        ("q_proj", ["optim-target-missing"]),  # for transformers a pattern for whole names
        ("*.q_proj", ["optim-target-missing"]),  # no pattern
        ('["_proj", "lm_head", "*.layers"]', ["optim-target-missing"]),
        (".*q_proj", []),
        ('["q_proj"]', []),
        ("all-linear", []),
        ("all_linear", []),
    ],
)
def test_layers_of_galore_are_looked_for_in_the_model(targets, found):
    job = job_of(tuning="full", learning_rate=1e-4, optim="galore_adamw", optim_target_modules=targets)
    assert ids(weights.before_training(job, tiny.llama())) == found


@pytest.mark.parametrize("targets", ["all-linear", '["c_attn"]', '["lm_head"]'])
def test_a_model_without_linear_layers_has_none_for_galore(targets):
    """GPT-2 has Conv1D, and its head is tied to the embeddings: transformers would train all of it with plain AdamW."""
    job = job_of(tuning="full", learning_rate=1e-4, optim="galore_adamw", optim_target_modules=targets)
    (finding,) = weights.before_training(job, tiny.gpt2())
    assert (finding.check, finding.fix) == ("optim-target-missing", "set another optim")


def test_adapters_on_the_right_layers_are_silent():
    job = job_of(learning_rate=2e-4)
    assert ids(weights.before_training(job, tiny.lora(tiny.llama()))) == []
    assert ids(weights.before_training(job, tiny.lora(tiny.llama(), r=64))) == ["rank-exceeds-layers"]


def test_trained_heads_of_a_bfloat16_base_are_found():
    """Beside adapters, which peft makes in float32; with ``tuning: full`` such optimizers are refused already."""
    model = tiny.lora(tiny.llama().bfloat16(), modules_to_save=["lm_head"])
    named = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
    found = [ids(weights.before_training(job_of(learning_rate=2e-5, **more), model)) for more in ({}, named)]
    assert "updates-round-away" in found[0] and "updates-round-away" not in found[1]


def test_a_nan_is_found_wherever_it_stands_in_a_small_model():
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[-1, -1] = float("inf")
    found = list(weights.before_training(job_of(tuning="full", learning_rate=1e-4), model))
    assert (
        ids(found) == ["weights-not-finite"] and "1 of 21 weights, first model.layers.1.mlp.down_proj" in found[0].what
    )


def test_which_steps_round_away_is_what_bfloat16_does():
    weight = torch.nn.Parameter(torch.linspace(0.001, 0.1, 5000).to(torch.bfloat16))
    step = 5e-5
    lost = ((weight.detach() - step) == weight.detach()).float().mean().item()
    found = weights._share_of_lost_updates([weight], step)
    assert 0.3 < found <= lost


@pytest.mark.parametrize(
    ("flags", "count", "bounds"),
    [
        ({"tuning": "lora"}, 10**9, (1e-5, 1e-2)),
        ({"tuning": "full"}, 10**9, (1e-8, 1e-3)),
        ({"tuning": "full"}, 10**6, (1e-8, 1e-2)),
        ({"task": "image-classification", "model_name_or_path": "resnet"}, 10**9, (1e-8, 1e-2)),
        ({"task": "image-classification"}, 10**7, (1e-7, 0.1)),
        ({"tuning": "full", "optim": "sgd"}, 10**9, (1e-5, float("inf"))),
        ({"tuning": "lora", "optim": "lion_32bit"}, 10**9, (1e-6, 1e-2 / 3)),
    ],
)
def test_usual_learning_rates(flags, count, bounds):
    assert weights.usual_rates(job_of(**flags), count) == pytest.approx(bounds)


# -- memory and disk ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optim", "bytes_per_weight"),
    [
        ("adamw_torch_fused", 8),
        ("adamw_8bit", 2),
        ("sgd", 0),
        ("adafactor", 0),
        ("lion_8bit", 1),
        ("paged_adamw_8bit", 0),
    ],
)
def test_bytes_of_the_optimizer(optim, bytes_per_weight):
    model = tiny.llama()
    assert room.state_bytes(job_of(optim=optim), model) == bytes_per_weight * sum(p.numel() for p in model.parameters())


def test_adam_s_state_is_as_large_as_it_is():
    model = tiny.llama()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    real = sum(v.nbytes for state in optimizer.state.values() for name, v in state.items() if name != "step")
    assert room.state_bytes(job_of(), model) == real


def test_frozen_weights_need_room_on_the_disk_unless_an_adapter_saves_none_of_them(tmp_path):
    training = tiny.arguments(tmp_path, save_strategy="steps", save_total_limit=2)
    whole = checkpoint_bytes(tiny.llama(), training)
    part, adapted = tiny.llama(), tiny.lora(tiny.llama())
    part.model.requires_grad_(False)
    frozen, trained = (
        sum(p.nbytes for p in part.parameters() if p.requires_grad == is_trained) for is_trained in (0, 1)
    )
    assert checkpoint_bytes(part, training) == trained * (4 * 3 + 1) + frozen * (3 + 1) < whole
    assert checkpoint_bytes(adapted, training) == weight_bytes(adapted) * (4 * 3 + 1)


@pytest.mark.parametrize(
    ("free_share", "expected"), [(0.99, ["memory-too-small"]), (1.05, ["memory-nearly-full"]), (1.2, [])]
)
def test_memory_is_compared_with_what_is_free(free_share, expected, tmp_path, monkeypatch):
    model, job = tiny.llama(), job_of()
    needed = 3 * weight_bytes(model)
    monkeypatch.setattr(room, "free_memory", lambda training: FreeMemory((), int(free_share * needed)))
    assert ids(room.before_training(job, model, tmp_path, 10)) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ids(room.before_training(job, model, tmp_path, 10)) == ["memory-too-small"]


@pytest.mark.parametrize(
    ("task", "how"),
    [
        ("text-generation", "to loss, or to perplexity with greater_is_better: false"),
        ("image-classification", "to loss, or to accuracy with greater_is_better: true"),
    ],
)
def test_a_metric_is_proposed_with_its_direction(task, how):
    job = job_of(task=task, eval_strategy="epoch", metric_for_best_model="f1")
    assert [finding.fix for finding in surroundings._check_best_metric(job)] == [f"set metric_for_best_model {how}"]


def test_a_limited_number_of_checkpoints_fills_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "free_bytes", lambda path: 2**20)
    every = {"save_steps": 1, "max_steps": 1000}
    assert ids(room.before_training(job_of(**every, save_total_limit=0), tiny.llama(), tmp_path, 1000)) == [
        "checkpoints-fill-disk"
    ]
    assert ids(room.before_training(job_of(**every, save_total_limit=3), tiny.llama(), tmp_path, 1000)) == []


@pytest.mark.parametrize(
    ("max_steps", "epochs", "found"), [(5, 10**6, []), (5000, 3, ["checkpoints-fill-disk"]), (-1, 3, [])]
)
def test_checkpoints_of_epochs_are_those_that_are_trained(max_steps, epochs, found, tmp_path, monkeypatch):
    """80 rows in steps of 8."""
    job = job_of(
        save_strategy="epoch",
        save_total_limit=0,
        max_steps=max_steps,
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
    )
    model = tiny.llama()
    monkeypatch.setattr(room, "free_bytes", lambda path: 10 * (weight_bytes(model) + room.state_bytes(job, model)))
    assert ids(room.before_training(job, model, tmp_path, job.planned_steps(80), 80)) == found


def test_a_disk_without_inodes_is_found(tmp_path, monkeypatch):
    for files, left, expected in ((10**6, 3, ["few-inodes"]), (10**6, 10**5, []), (0, 0, [])):
        monkeypatch.setattr(os, "statvfs", lambda path, f=files, n=left: SimpleNamespace(f_files=f, f_favail=n))
        assert ids(surroundings._check_inodes(tmp_path / "run")) == expected


# -- settings and length -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "processes", "fix"),
    [(2.5, "1", "set OMP_NUM_THREADS=2"), (16, "4", "set OMP_NUM_THREADS=4"), (8, "1", None), (7.5, "1", None)],
)
def test_threads_for_which_there_are_no_cores_are_found(cores, processes, fix, monkeypatch):
    """A container's limit on processor time: torch takes all cores of the machine, and loses several times the time."""
    monkeypatch.setattr(surroundings, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    found = [one for one in surroundings.before_loading(job_of()) if one.check == "more-threads-than-cores"]
    assert [one.fix for one in found] == ([] if fix is None else [fix])


def test_both_max_steps_and_epochs_are_noted():
    assert ids(plan.before_loading(job_of(max_steps=10, num_train_epochs=7))) == ["epochs-ignored"]
    assert ids(plan.before_loading(job_of(max_steps=10))) == []


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ({}, []),
        ({"eval_strategy": "steps", "eval_steps": 2}, []),
        ({"eval_strategy": "no", "eval_steps": 2}, ["eval_steps"]),
        ({"eval_strategy": "epoch", "eval_steps": 2}, ["eval_steps"]),
        ({"lora_r": 16}, []),
        ({"tuning": "full"}, []),
        ({"tuning": "full", "lora_r": 16, "lora_target_modules": "q_proj"}, ["lora_r, lora_target_modules"]),
        ({"save_total_limit": 1}, []),
        ({"save_total_limit": 0}, ["save_total_limit"]),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, []),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, ["warmup_steps"]),
        *(
            ({"optim": f"schedule_free_{kind}", "lr_scheduler_type": "constant", "warmup_steps": 5}, idle)
            for kind, idle in (("adamw", []), ("sgd", []), ("radam", ["warmup_steps"]))
        ),
        ({"optim": "schedule_free_sgd", "lr_scheduler_type": "constant", "adam_beta1": 0.5}, ["adam_beta1"]),
        *(({"optim": optim, "weight_decay": 0.1}, ["weight_decay"]) for optim in ("galore_adamw", "apollo_adamw")),
        ({"optim": "apollo_adamw", "adam_beta1": 0.5}, []),
        ({"optim": "galore_adamw", "adam_beta1": 0.5}, ["adam_beta1"]),
        ({"save_strategy": "epoch", "save_steps": 5}, ["save_steps"]),
        ({"logging_strategy": "epoch", "logging_steps": 5}, []),
        ({"logging_strategy": "epoch", "logging_steps": 5, "scu": "false"}, ["logging_steps"]),
        ({"eval_strategy": "no", "eval_delay": 5}, ["eval_delay"]),
        ({"hub_model_id": "me/mine"}, ["hub_model_id"]),
        ({"optim": "sgd", "adam_beta1": 0.5}, ["adam_beta1"]),
        ({"adam_beta1": 0.5}, []),
        ({"optim_target_modules": "q_proj"}, ["optim_target_modules"]),
        ({"length_column_name": "size"}, ["length_column_name"]),
        ({"length_column_name": "size", "curriculum": "token_budget"}, []),
        ({"eval_dataset": "stdlib_source", "validation_split_percentage": 20}, ["validation_split_percentage"]),
        ({"sample_prompts": 0, "sample_max_new_tokens": 9}, ["sample_max_new_tokens"]),
        ({"model_revision": "main"}, ["model_revision"]),
        ({"adapter_name_or_path": "me/mine", "model_revision": "main"}, []),
        ({"embedded_base_steps": 5}, []),
        ({"model_name_or_path": "gpt2", "embedded_base_steps": 5}, ["embedded_base_steps"]),
        ({"bnb_4bit_quant_type": "fp4"}, ["bnb_4bit_quant_type"]),
        ({"activation_checkpointing_kwargs": "{}"}, ["activation_checkpointing_kwargs"]),
        ({"activation_checkpointing_kwargs": "{}", "activation_checkpointing": "true"}, []),
        ({"liger_kernel_config": "{}"}, ["liger_kernel_config"]),
        ({"do_predict": "true", "include_for_metrics": "inputs"}, ["do_predict", "include_for_metrics"]),
        ({"fsdp_config": "{}"}, ["fsdp_config"]),
        ({"tuning": "qlora", "bnb_4bit_quant_type": "fp4"}, []),
        ({"divergence": "off", "divergence_factor": 9}, ["divergence_factor"]),
        ({"difficulty_alpha": 0.2}, ["difficulty_alpha"]),
        ({"difficulty_alpha": 0.2, "curriculum": "noise_guard"}, []),
        ({"scu_target_s": 0.1, "scu_time_constant": 5}, []),
        ({"scu_target_s": 0.1, "scu_kp": 2, "scu_lambda_init": 4}, ["scu_kp", "scu_lambda_init"]),
        ({"scu_law": "fixed", "scu_time_constant": 5, "scu_lambda_init": 4}, ["scu_time_constant"]),
        ({"scu_law": "original", "scu_target_s": 0.1, "scu_kp": 2, "scu_schedule": "cosine"}, ["scu_schedule"]),
        ({"scu_law": "original", "scu_target_s": 0.1, "scu_lambda_max": 2, "scu_deadband": 0.1}, []),
        ({"scu_law": "fixed", "scu_lambda_max": 0.1}, ["scu_lambda_max"]),
        ({"scu_law": "schedule", "scu_lambda_min": 0.1, "scu_deadband": 0.1}, ["scu_lambda_min, scu_deadband"]),
        ({"max_batch_size": 4}, []),
        ({"max_batch_size": 4, "memory_control": "false"}, ["max_batch_size"]),
        ({"max_batch_size": 4, "memory_control": "false", "token_cap": 512}, []),
        ({"pid_kp": 2, "memory_control": "false", "token_cap": 512}, ["pid_kp"]),
    ],
)
def test_settings_without_effect_are_noted(flags, where):
    found = list(pitfalls.before_loading(job_of(**flags)))
    assert [finding.where for finding in found] == where
    assert all(finding.level == "note" for finding in found)


def test_a_task_that_tunes_all_weights_by_itself_is_not_noted():
    assert ids(pitfalls.before_loading(job_of(task="image-classification"))) == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"optim": "sgd", "learning_rate": 2}, []),
        ({"optim": "sgd", "adam_beta2": 0.1}, []),
        ({"max_grad_norm": 0}, []),
        ({"lora_alpha": 32}, []),
        ({"learning_rate": -1e-4}, ["learning-rate-not-positive"]),
        ({"gradient_accumulation_steps": 0}, ["no-rows-per-step"]),
        ({"max_steps": 0}, ["no-steps"]),
        ({"max_steps": 0, "num_train_epochs": 0}, ["no-steps"]),
        ({"max_steps": 5, "num_train_epochs": 0}, []),
    ],
)
def test_settings_of_the_optimizer(flags, expected):
    assert ids(optimization.before_loading(job_of(**flags))) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"warmup_steps": 49}, []),
        ({"warmup_steps": 50}, ["warm-up-covers-run"]),
        ({"warmup_steps": 0.6}, ["warm-up-covers-run"]),
        ({"warmup_steps": 50, "lr_scheduler_type": "constant"}, []),
        ({"save_steps": 100}, []),
        ({"save_steps": 101}, ["no-checkpoint-before-end"]),
        ({"save_steps": 0.5}, []),
        ({"save_strategy": "no"}, []),
        ({"eval_strategy": "steps", "eval_steps": 100}, []),
        ({"eval_strategy": "steps", "eval_steps": 50, "eval_delay": 101}, ["no-evaluation-before-end"]),
        ({"eval_strategy": "steps", "eval_steps": 30, "scu_target_s": "auto"}, []),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr": 1e-5}'}, []),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": '{"cycles": 1}'}, ["schedule-cannot-be-made"]),
    ],
)
def test_what_never_happens_in_100_steps(flags, expected):
    assert ids(length.before_loading(job_of(max_steps=100, **{"save_steps": 50, **flags}))) == expected


def test_an_epoch_of_two_steps_is_enough():
    job = job_of(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=10)
    assert ids(length.before_training(job, range(9))) == []
    assert ids(length.before_training(job, range(8))) == ["batch-exceeds-rows"]
    assert ids(length.before_training(job, iter(()))) == []


def test_the_last_step_of_an_epoch_has_its_own_number_of_rows():
    said, _ = plan._steps_text(6, 8, "8 x 1 accumulated", rows=20)
    assert said == "6 steps of 8 rows (8 x 1 accumulated; the last step of an epoch has 4), 2.0 epochs of 20 rows"
    said, _ = plan._steps_text(6, 8, "4 x 1 accumulated x 2 ranks", rows=20, ranks=2)
    assert "ranks; the last steps of an epoch may have fewer), 2.0" in said, (
        "of 17 rows the last two steps have 7 and 2"
    )


def test_an_epoch_of_the_stock_loaders_drops_or_repeats_rows(monkeypatch):
    alone = job_of(per_device_train_batch_size=8, dataloader_drop_last=True, num_train_epochs=2)
    assert alone.planned_steps(18) == 4
    said, _ = plan._steps_text(4, 8, "8 x 1 accumulated", rows=18, trained=plan._trained_rows(alone, 18))
    assert said.endswith("2.0 epochs of 18 rows, 2 of them left out by dataloader_drop_last")

    monkeypatch.setattr(TrainingArguments, "world_size", 3)
    shared, sorted_by = job_of(per_device_train_batch_size=8), {"train_sampling_strategy": "sequential"}
    assert [plan._trained_rows(shared, rows) for rows in (18, 2)] == [18, 3], "the curriculum shares out what there is"
    by_one = job_of(per_device_train_batch_size=1)
    assert [plan._trained_rows(by_one, rows) for rows in (4, 6, 2)] == [6, 6, 3], (
        "a batch of one row cannot be shared out"
    )
    stock = job_of(per_device_train_batch_size=8, **sorted_by)
    said, per_step = plan._steps_text(2, 24, "8 x 1 accumulated x 3 ranks", 18, 3, plan._trained_rows(stock, 18))
    assert said == (
        "2 steps of 24 rows (8 x 1 accumulated x 3 ranks), 2.0 epochs of 18 rows and 6 repeated to fill the batches of "
        "all ranks"
    )
    assert per_step == 24
    uneven = job_of(per_device_train_batch_size=8, accelerator_config='{"even_batches": false}', **sorted_by)
    assert plan._trained_rows(uneven, 18) == 18


def test_findings_end_without_a_number_of_steps(tmp_path):
    assert before_training(job_of(gradient_accumulation_steps=0), SimpleNamespace(), tmp_path) == []


# -- data --------------------------------------------------------------------------------------------------------------


def test_few_duplicates_and_few_drops_are_silent():
    statistics = SampleStatistics(read=1000, train=800, eval=200, dropped={"torn": 99}, heldout_duplicates=3)
    statistics.examples = {"torn": ["a.png"]}
    assert ids(counts._check_samples(job_of(), statistics)) == []
    statistics.dropped, statistics.heldout_duplicates = {"torn": 100}, 4
    assert ids(counts._check_samples(job_of(), statistics)) == ["many-dropped", "held-out-seen"]


def test_a_class_folder_without_an_image_is_no_image_that_is_left_out():
    reasons = {"class folder without an image": 2}
    statistics = SampleStatistics(read=10, train=8, eval=2, dropped=reasons, examples={name: ["a"] for name in reasons})
    assert ids(counts._check_samples(job_of(eval_strategy="no"), statistics)) == []


def test_folders_of_datasets_and_names_of_the_hub_are_left_alone(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": "", "completion": f"a{i}"}) + "\n" for i in range(4)))
    assert ids(columns.before_loading(job_of(dataset=file))) == ["prompts-empty"]
    assert ids(columns.before_loading(job_of(dataset=tmp_path))) == ["prompts-empty"]
    assert ids(columns.before_loading(job_of(dataset="no_such"))) == []
    (tmp_path / "state.json").write_text("{}")
    assert ids(columns.before_loading(job_of(dataset=tmp_path))) == []


def test_shares_in_words():
    assert [percent(share) for share in (0, 0.0042, 0.42, 0.997, 1)] == ["0%", "0.42%", "42%", "over 99%", "100%"]


def test_words_that_a_template_leaves_out_around_answers_are_no_reason_to_take_another():
    """It is the model's own: DeepSeek R1 asks with "<think>" and renders none."""
    around = f"'<think>', {columns.AROUND_ANSWERS} asks for an answer"
    found = list(columns.before_training(DataStatistics(rendered_away={around: 3, "tools": 2})))
    assert ids(found) == ["rendered-away"] * 2
    assert "the model's own" in found[0].fix and "--chat_template qwen" in found[1].fix
