"""A model that answers: what it reads, where it stops, that batches and memory change no answer."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from transformers import AddedToken, AutoTokenizer, GenerationConfig

from scu_trainer.cli.subjects import Subject
from scu_trainer.cli.talking.options import talker as talker_of
from scu_trainer.data.formats import Columns, read_content
from scu_trainer.data.records import Record
from scu_trainer.data.text.encode import NOT_LEARNED, Encoder
from scu_trainer.errors import DataError, ModelError, OutOfMemory, SettingsError
from scu_trainer.models.loading.adapters import generation_obstacle
from scu_trainer.settings import DataSettings, ModelSettings
from scu_trainer.talk import answers as subject
from scu_trainer.talk.answers import AnswerSettings, BatchedAnswers, fit_to_positions, stream
from scu_trainer.talk.model import base_talker, load_talker, stop_tokens
from scu_trainer.talk.prompts import read_prompts
from scu_trainer.train.evaluation.answers import answered
from scu_trainer.train.evaluation.answers import stop_tokens as ends_of_reference
from scu_trainer.train.evaluation.harness import Harness
from scu_trainer.train.retention.sampled import sampled_text
from tests import tiny
from tests.faults import oom

GREEDY = AnswerSettings(max_new_tokens=12)
QUESTION = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def talker(folder):
    return load_talker("tiny", ModelSettings(model_name_or_path=str(folder), tuning="full", dtype="float32"))


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("adapter")
    model = tiny.lora(type(tiny.llama()).from_pretrained(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(place)
    return load_talker("adapter", ModelSettings(model_name_or_path=str(place), dtype="float32"))


def prompts(talker, count: int = 7) -> list[list[int]]:
    return [talker.encoded([{"role": "user", "content": "word " * (1 + 3 * i % 8)}]) for i in range(count)]


@pytest.fixture
def prompted():
    """A model with a learned prompt, and weights large enough for it to matter."""
    model = get_peft_model(tiny.llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
    return model


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_a_model_with_a_learned_prompt_writes_what_it_learned_or_says_that_it_cannot(prompted, talker):
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        for _ in range(8):
            scores = prompted(ids, attention_mask=torch.ones_like(ids)).logits
            ids = torch.cat([ids, scores[:, -1:].argmax(-1)], dim=1)
    ids = ids[0].tolist()
    assert generation_obstacle(prompted) or answered(prompted, talker.tokenizer, ids[:3], [], 8) == ids[3:]


def test_a_learned_prompt_with_a_peft_older_than_transformers_asks_for(prompted, talker, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.1")
    assert generation_obstacle(tiny.lora(tiny.llama())) is None
    with pytest.raises(ModelError, match=r'tiny: peft .* needs peft 99.1 or later: pip install "peft>=99.1"'):
        replace(talker, model=prompted)
    with pytest.raises(ModelError, match=r"retain: sampled lets the model write, but peft .*give a file of text"):
        sampled_text(prompted, talker.tokenizer, tmp_path, documents=1, tokens=1, seed=0)
    with pytest.raises(ModelError, match=r"task gsm8k generates text, but peft "):
        next(Harness(["gsm8k"], 1, _generated={"gsm8k": 256}).ask(prompted, talker.tokenizer, "no"))


def test_a_stream_is_the_answer_of_generate(talker):
    token_ids, counts = talker.encoded(QUESTION), []
    text = "".join(stream(talker, token_ids, GREEDY, counts.append))
    inputs = torch.tensor([token_ids])
    made = talker.model.generate(inputs, max_new_tokens=12, do_sample=False)[0, len(token_ids) :]
    assert text == talker.tokenizer.decode(made, skip_special_tokens=True) and counts == [len(made)]


def test_closing_a_stream_ends_it(talker):
    written = stream(talker, talker.encoded(QUESTION), AnswerSettings(max_new_tokens=80))
    next(written)
    written.close()
    assert "".join(stream(talker, talker.encoded(QUESTION), GREEDY)), "the model is free again"


def test_what_fails_while_it_writes_is_raised(talker, monkeypatch):
    def fails(**words):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(talker.model, "generate", fails)
    with pytest.raises(ModelError, match="tiny cannot answer: no such kernel"):
        list(stream(talker, [3, 4], GREEDY))


def test_an_answer_ends_with_the_turn_of_the_template(talker):
    end = talker.tokenizer.convert_tokens_to_ids(talker.tokenizer.all_special_tokens)
    assert set(talker.stops) <= {*end, talker.model.generation_config.eos_token_id}
    first = BatchedAnswers(talker, GREEDY, 1)
    (answer,) = first.answers([talker.encoded(QUESTION)])
    assert answer.finish_reason in ("stop", "length") and answer.tokens <= 12


def test_an_answer_ends_with_a_turn_that_only_the_added_tokens_name(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<|eot_id|>", special=True)])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<|eot_id|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert "<|eot_id|>" not in read.all_special_tokens
    end = read.convert_tokens_to_ids("<|eot_id|>")
    assert end in stop_tokens(None, read) and end in ends_of_reference(None, read, [3, end])


def test_batches_of_any_size_give_the_same_answers(talker):
    found = [list(BatchedAnswers(talker, GREEDY, rows).answers(prompts(talker))) for rows in (1, 3, 7)]
    assert found[0] == found[1] == found[2] and len(found[0]) == 7


def failing(talker, monkeypatch, most_rows: int):
    real, sizes = talker.model.generate, []

    def generate(input_ids=None, **words):
        if len(input_ids) > most_rows:
            raise oom()
        sizes.append(len(input_ids))
        return real(input_ids=input_ids, **words)

    monkeypatch.setattr(talker.model, "generate", generate)
    return sizes


def test_out_of_memory_loses_no_answer_and_larger_batches_are_tried_again(talker, monkeypatch):
    asked = prompts(talker, 16)
    expected = list(BatchedAnswers(talker, GREEDY, 1).answers(asked))
    monkeypatch.setattr(subject, "GOOD_BEFORE_GROWTH", 2)
    sizes = failing(talker, monkeypatch, most_rows=2)
    batches = BatchedAnswers(talker, GREEDY, 4)
    assert list(batches.answers(asked)) == expected
    assert max(sizes) == 2 and batches.out_of_memory == 2  # once, and once when it tried to grow


def test_a_single_prompt_that_never_fits(talker, monkeypatch):
    failing(talker, monkeypatch, most_rows=0)
    with pytest.raises(OutOfMemory, match=r"one prompt .* does not fit in memory; lower --max_new_tokens"):
        list(BatchedAnswers(talker, GREEDY, 4).answers(prompts(talker, 2)))


def test_the_base_of_an_adapter_answers_in_the_same_memory(adapter, talker):
    assert isinstance(adapter.model, PeftModel)
    base, token_ids = base_talker(adapter, "base"), adapter.encoded(QUESTION)
    said = {one.name: "".join(stream(one, token_ids, GREEDY)) for one in (adapter, base, talker)}
    assert said["base"] == said["tiny"] != said["adapter"]


def test_the_oldest_turns_make_room(talker):
    turns = [
        {"role": role, "content": f"{number} " * 12}
        for number, role in enumerate(["system"] + ["user", "assistant"] * 4)
    ]
    asked = [*turns, *QUESTION]
    token_ids, dropped = talker.trimmed(asked, 12)
    assert len(token_ids) + 12 <= talker.positions == 128 and dropped > 0 and dropped % 2 == 0
    assert token_ids == talker.encoded([turns[0], *asked[1 + dropped :]])
    assert talker.trimmed(QUESTION, 12) == (talker.encoded(QUESTION), 0)
    with pytest.raises(DataError, match="more than the 128 positions of tiny; shorten the prompt"):
        talker.trimmed(QUESTION, 125)


def test_an_answer_is_as_long_as_the_positions_allow(talker):
    short, long = QUESTION, [{"role": "user", "content": "word " * 40}]
    for messages in (short, long):
        token_ids, dropped, settings = fit_to_positions(talker, messages, AnswerSettings(max_new_tokens=500))
        assert dropped == 0 and len(token_ids) + settings.max_new_tokens == talker.positions
    assert fit_to_positions(talker, short, GREEDY)[2] == GREEDY


def test_without_a_template_the_text_goes_on(folder, talker):
    plain = load_talker("plain", ModelSettings(model_name_or_path=str(folder), tuning="full"))
    plain.tokenizer.chat_template = None
    assert not plain.has_template and plain.encoded(QUESTION) == plain.tokenizer("What is a list?")["input_ids"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be above 0, or 0 for greedy answers"),
        ({"temperature": 0.0}, "must be above 0; for greedy answers leave it out and set do_sample to false"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": False, "top_k": 5}, "top_k have an effect only when tokens are sampled"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        AnswerSettings(**changes)


@pytest.mark.parametrize(
    ("given", "configured", "said"),
    [
        ({"temperature": 0.7}, {}, "temperature 0.7, top_p 1, top_k 50"),
        ({"top_p": 0.9}, {}, "temperature 1, top_p 0.9, top_k 50"),
        ({"top_k": 0}, {"do_sample": True, "top_p": 0.95}, "temperature 1, top_p 0.95, top_k 0"),
        ({}, {"do_sample": True, "top_k": 64}, "temperature 1, top_p 1, top_k 64"),
    ],
)
def test_how_answers_are_drawn_is_said_where_little_is_set(talker, monkeypatch, given, configured, said):
    monkeypatch.setattr(talker.model, "generation_config", GenerationConfig(**configured))
    settings = AnswerSettings(max_new_tokens=2, **given)
    assert settings.in_words(talker) == f"sampled at {said}, seed 0"
    used = subject.DRAWS | configured | given
    prepared, _ = talker.model._prepare_generation_config(settings.config(talker))
    assert {name: getattr(prepared, name) for name in subject.DRAWS} == {name: used[name] for name in subject.DRAWS}
    defaults = GenerationConfig._get_default_generation_params()
    assert {name: defaults[name] for name in subject.DRAWS} == subject.DRAWS


@pytest.mark.parametrize(
    "configured",
    [
        {"stop_strings": ["zzz"]},
        {"return_dict_in_generate": True},
        {"do_sample": True, "num_return_sequences": 2},
        {"num_beams": 2},
        {"penalty_alpha": 0.6},
    ],
)
def test_a_generation_config_of_others_gives_the_same_answers(talker, monkeypatch, configured):
    prompt, greedy = talker.encoded(QUESTION), AnswerSettings(max_new_tokens=12, do_sample=False)
    expected, sample = "".join(stream(talker, prompt, greedy)), (talker.model, talker.tokenizer, prompt, talker.stops)
    sampled = answered(*sample, 12)
    monkeypatch.setattr(talker.model, "generation_config", GenerationConfig(**configured))
    assert "".join(stream(talker, prompt, greedy)) == expected
    assert [reply.text for reply in BatchedAnswers(talker, greedy, 2).answers([prompt, prompt])] == [expected] * 2
    assert answered(*sample, 12) == sampled


def test_drawn_answers_are_those_of_the_seed(talker):
    drawn = [
        "".join(stream(talker, talker.encoded(QUESTION), AnswerSettings(12, temperature=2.0, seed=seed)))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_text_goes_on_where_the_tokenizer_ends_every_text(folder):
    plain = load_talker("plain", ModelSettings(model_name_or_path=str(folder), tuning="full", dtype="float32"))
    plain.tokenizer.chat_template = None
    before = plain.encoded(QUESTION)
    tiny.end_every_text(plain.tokenizer)
    assert plain.tokenizer("a")["input_ids"][-1] == plain.tokenizer.eos_token_id
    assert plain.encoded(QUESTION) == before


@pytest.mark.parametrize("ends_every_text", [False, True])
def test_an_end_that_a_text_itself_has_stays(folder, ends_every_text):
    plain = load_talker("plain", ModelSettings(model_name_or_path=str(folder), tuning="full", dtype="float32"))
    plain.tokenizer.chat_template = None
    if ends_every_text:
        tiny.end_every_text(plain.tokenizer)
    end = plain.tokenizer.eos_token
    expected = plain.tokenizer(f"a{end}b{end}", add_special_tokens=False)["input_ids"]
    assert plain.encoded([{"role": "user", "content": f"a{end}b{end}"}])[1:] == expected


def test_a_question_is_laid_out_as_it_was_trained_on_without_a_template(folder):
    formats = {"question and answer (question, answer) as plain text, because there is no chat template": 40}
    run = {"configuration": {"task": "text-generation"}, "data": {"formats": formats}}
    model = ModelSettings(model_name_or_path=str(folder), tuning="full", dtype="float32")
    plain = talker_of(Subject("plain", model, run))
    plain.tokenizer.chat_template = None
    row = {"question": "What is a list?", "answer": "A row of things.", "system": "Be brief."}
    [document] = Encoder(DataSettings(), plain.tokenizer, "plain").encode([Record("row 1", row)])
    learned = document.input_ids[document.labels == NOT_LEARNED].tolist()
    assert plain.encoded([{"role": "system", "content": "Be brief."}, *QUESTION]) == learned
    assert plain.notes("mine") == ["mine has no chat template: a blank line follows the question"]
    assert document.read.format.endswith(" as plain text, because there is no chat template")


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_prompts_in_every_way_that_people_write_them(tmp_path):
    rows = [
        {"prompt": "a"},
        {"instruction": "b", "input": "c", "output": "d", "system": "s"},
        {"messages": [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]},
        {"conversations": [{"from": "human", "value": "g"}]},
        {"question": "h"},
        {"question": "i", "context": "j", "history": [["k", "l"]], "system_prompt": "s"},
        {"conversations": [{"from": "human", "value": "m"}], "system": "s"},
        {"prompt": json.dumps([{"role": "user", "content": "n"}])},
        {"instruction": "o", "input": "p", "context": ["not read beside input"]},
        {"prompt": "q", "completion": "r", "context": "not read beside a completion"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [[(turn["role"], turn["content"]) for turn in row.messages] for row in read_prompts(tmp_path / "p.jsonl")]
    assert found == [
        [("user", "a")],
        [("system", "s"), ("user", "b\nc")],
        [("user", "e")],
        [("user", "g")],
        [("user", "h")],
        [("system", "s"), ("user", "k"), ("assistant", "l"), ("user", "i\nj")],
        [("system", "s"), ("user", "m")],
        [("user", "n")],
        [("user", "o\np")],
        [("user", "q")],
    ]
    (tmp_path / "p.txt").write_text("one\n\n two \n")
    assert [row.messages[0]["content"] for row in read_prompts(tmp_path / "p.txt")] == ["one", "two"]
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo\n"))
    assert [row.messages[0]["content"] for row in read_prompts(tmp_path / "p.txt.gz")] == ["one", "two"]


def test_a_prompt_is_the_one_that_was_trained_on(tmp_path):
    """Else a model is asked in other words than those that it has learned to answer."""
    row = {"instruction": "b", "input": "c", "output": "d", "system": "s"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    learned = read_content(row, Columns()).content.as_chat().messages
    assert read_prompts(tmp_path / "p.jsonl")[0].messages == learned[:-1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x"}, "row 1 has the columns body; give a column messages"),
        ({"prompt": "  "}, "row 1 has the columns prompt"),
        ({"id": 1, "prompt": ""}, "prompt, but prompt is ''; write a prompt there, or remove the row"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages has no turn with text; write a prompt"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages has no turn before the answer"),
        ({"messages": [{"role": "user"}]}, "row 1"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]}, "the tools in 'tools'"),
        ({"question": "x", "functions": '[{"name": "f"}]'}, "the tools in 'functions'"),
        ({"messages": [{"role": "user", "content": "x"}], "images": ["a.png"]}, "the media in 'images'"),
        ({"prompt": "x", "completion": "y", "image": "a.png"}, "the media in 'image'"),
        ({"question": "x", "context": ["y"]}, "'context' holds list, not text, and belongs to 'question'"),
        ({"question": "x", "history": 5}, "column 'history' is not a list"),
    ],
)
def test_a_row_without_a_prompt_is_named(row, message, tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        read_prompts(tmp_path / "p.jsonl")
