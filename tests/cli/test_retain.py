"""``scu-trainer retain``: as much of an update as a budget on other text allows, judged by rows that chose nothing."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from scu_trainer.cli.evaluation import retain
from scu_trainer.cli.evaluation.retain import RETAIN_FILE, _split_in_halves
from scu_trainer.cli.main import main as cli
from scu_trainer.errors import DataError
from tests import tiny

TEXTS = [f"Row {i} has the value {i * 7919 % 1000} and the name {i * 31 % 97}. " * 3 for i in range(24)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that has learned the anchor, so that there is something to lose."""
    folder = tiny.saved_llama(tmp_path_factory.mktemp("base"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = tokenizer(TEXTS, return_tensors="pt", padding=True, truncation=True, max_length=48)["input_ids"]
    for _ in range(25):
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def anchor(tmp_path_factory):
    path = tmp_path_factory.mktemp("anchor") / "anchor.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def moved(model, size: float, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    moved(tiny.lora(AutoModelForCausalLM.from_pretrained(base)), 0.3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    moved(AutoModelForCausalLM.from_pretrained(base), 0.3).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def retained(capsys, *words) -> tuple[int, str, str]:
    code = cli(["retain", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_an_adapter_is_scaled_until_it_keeps_the_budget(adapter, base, anchor, tmp_path, capsys):
    words = [adapter, "--anchor", anchor, "--budget_bits", "0.05", "--output_dir", tmp_path / "out", "--json"]
    code, out, err = retained(capsys, *words)
    assert code == 0, err
    report = json.loads(out)
    assert report == json.loads((tmp_path / "out" / RETAIN_FILE).read_text())
    assert 0 < report["share"] < 1 and report["lost_bits_of_the_whole_update"]["value"] > 0.1
    assert report["is_within_budget"] and report["lost_bits"]["value"] <= 0.05
    assert (report["deciding_documents"], report["judging_documents"]) == (12, 12) and report["own_text"] is None
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    for name, weight in model.named_parameters():
        factor = report["share"] if "lora_B" in name else 1.0
        assert torch.allclose(weight, factor * whole.get_parameter(name), atol=1e-6), name
    assert retained(capsys, *words)[0] == 2, "a folder that is not empty"


def test_a_full_model_lies_between_its_base_and_itself(tuned, base, anchor, tmp_path, capsys):
    words = [tuned, "--base", base, "--anchor", anchor, "--budget_bits", "0.05", "--output_dir", tmp_path / "out"]
    code, out, err = retained(capsys, *words)
    assert code == 0, err
    report = json.loads((tmp_path / "out" / RETAIN_FILE).read_text())
    assert f"kept: {report['share']:.1%} of the update" in out
    assert "documents that played no part in the decision" in out
    models = [AutoModelForCausalLM.from_pretrained(place) for place in (base, tuned, tmp_path / "out")]
    for start, end, middle in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(middle, start + report["share"] * (end - start), atol=1e-5)


def test_the_base_is_left_where_nothing_fits(adapter, anchor, tmp_path, capsys):
    words = [adapter, "--anchor", anchor, "--budget_bits", "0", "--output_dir", tmp_path / "out"]
    code, out, _ = retained(capsys, *words)
    report = json.loads((tmp_path / "out" / RETAIN_FILE).read_text())
    if report["share"] == 0:
        assert "what was written is the base" in out
    assert code == 0 and report["lost_bits"]["value"] <= 0.01


def test_the_halves_share_no_document_and_are_drawn_by_the_seed():
    deciding, judging = _split_in_halves(25, 0)
    assert sorted([*deciding, *judging]) == list(range(25)) and len(deciding) == 12
    assert list(_split_in_halves(25, 0)[0]) == list(deciding) != list(_split_in_halves(25, 1)[0])
    with pytest.raises(DataError, match=r"the anchor has 7 documents.*give 8 or more"):
        _split_in_halves(7, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget_bits", "-1"], "budget_bits is -1; give 0 or more"),
        (["--budget_bits", "inf"], "budget_bits is inf; give 0 or more"),
    ],
)
def test_a_budget_that_is_none(adapter, anchor, words, message, capsys):
    code, _, err = retained(capsys, adapter, "--anchor", anchor, *words)
    assert code == 2 and message in err


def test_a_full_model_without_its_base(tuned, anchor, capsys):
    code, _, err = retained(capsys, tuned, "--anchor", anchor, "--budget_bits", "0.1")
    assert code == 2 and "its base is unknown; give it as a path or Hub id: --base PATH_OR_ID" in err


def test_a_base_that_is_another_model(tuned, anchor, tmp_path, capsys):
    from scu_trainer.data import default_cache_dir, embedded_tokenizer

    tokenizer = embedded_tokenizer(default_cache_dir(None))
    other = tiny.llama(layers=1)
    other.resize_token_embeddings(len(tokenizer))
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    words = [tuned, "--base", tmp_path / "other", "--anchor", anchor, "--budget_bits", "0.1"]
    code, _, err = retained(capsys, *words, "--output_dir", tmp_path / "out")
    assert code == 2 and "it is not the base of this model" in err and not (tmp_path / "out").exists()


def test_one_held_out_document_of_the_run_gives_no_interval():
    """It cannot be resampled: bounds that are the value itself would claim a certainty that nobody measured."""
    bits = {"value": -0.5, "low": -0.6, "high": -0.4, "confidence": 0.95}
    one = {**bits, "low": None, "high": None}
    said = retain.as_text(
        {"share": 1.0, "anchor": "a.txt", "judging_documents": 4, "budget_bits": 1.0, "is_within_budget": True,
         "lost_bits": bits, "lost_bits_of_the_whole_update": bits, "folder": "out",
         "own_text": {"documents": 1, "whole": one, "kept": one}}
    )  # fmt: skip
    assert "held out, 1 document, against the base:\n  with all of it      -0.5000 bits per token\n" in said
    assert "-0.5000 bits per token (-0.6000 to -0.4000, 95% interval), the budget is 1" in said
