"""The table of paths and the search under a limit, as a person calls them; paths are stood in for by their outcomes."""

from __future__ import annotations

import json

import pytest

from scu_trainer.cli import variants
from scu_trainer.runs.studies.variant_table import BY_NAME, VARIANTS
from scu_trainer.runs.studies.variants import VariantResult

ALL_ACT = {"regularization": "acts", "memory": "acts", "curriculum": "acts"}
MIB = 2**20


def outcome_of(variant, peak_mib: int, bpt=(9.0, 8.5)) -> VariantResult:
    return VariantResult(
        variant.name,
        "ran",
        peak_bytes=peak_mib * MIB,
        total_bytes=(peak_mib + 400) * MIB,
        step_s=2.0 if variant.name == "lora" else 3.0,
        bpt=bpt,
        loops=ALL_ACT,
        device="cpu",
        parts={"weights": peak_mib * MIB // 2, "logits": 7 * MIB, "gradients": 0, "libraries": 80 * MIB},
    )


@pytest.fixture
def no_training(monkeypatch):
    """Runs nothing: each path takes what ``peaks`` says. Returns the names that were started, and their extra flags."""
    started = []

    def install(peaks: dict[str, int]):
        def run(variant, plan, has_gpu):
            started.append((variant.name, plan.extra))
            return outcome_of(variant, peaks[variant.name])

        monkeypatch.setattr(variants, "run", run)
        monkeypatch.setattr(variants, "_last_line_of_module", lambda *words: '{"weights": 1000, "linear_weights": 800}')
        monkeypatch.setattr(variants, "has_cuda", lambda: False)
        return started

    return install


def test_a_table_with_ratios_to_the_default(no_training, capsys, tmp_path):
    no_training({"lora": 400, "qlora": 200})
    assert variants.main(["lora", "qlora", "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert "200 MiB (0.50)" in shown and "1.50" in shown and "9.00 -> 8.50" in shown and "all act" in shown
    by_part = shown.partition("predicted peak by part, MiB")[2]
    assert "weights" in by_part and "logits" in by_part and "gradients" not in by_part and "libraries" not in by_part
    assert "200.0" in by_part and "100.0" in by_part and "7.0" in by_part
    record = json.loads((tmp_path / "out.json").read_text())
    assert [outcome["name"] for outcome in record["outcomes"]] == ["lora", "qlora"]
    assert {"machine", "versions", "date", "command"} <= {*record}


def test_a_broken_promise_ends_with_1(no_training, capsys):
    no_training({"lora": 400, "qlora": 399})
    assert variants.main(["lora", "qlora"]) == 1
    assert "broken: qlora: peak memory is 1.00 of lora's, it should be at most 0.9" in capsys.readouterr().out


def test_the_limit_reaches_every_run_and_the_first_that_fits_is_named(no_training, capsys):
    names = [variant.name for variant in VARIANTS if variant.tuning == "lora" and variant.processes == 1]
    started = no_training({**dict.fromkeys(names, 900), "lora_checkpointing": 100})
    assert variants.main(["--limit", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "first that fits: lora_checkpointing (measured peak 0.49 GiB of 0.50 GiB)" in shown
    assert "add --tuning lora --checkpoint_every_layer true" in shown
    assert [name for name, _ in started] == names[: names.index("lora_checkpointing") + 1]
    assert all(extra[-2:] == ("--memory_limit_gb", "0.5") for _, extra in started)


def test_nothing_fits_ends_with_2(no_training, capsys):
    started = no_training({variant.name: 900 for variant in VARIANTS})
    assert variants.main(["--limit", "1GiB", "--tuning", "full"]) == 2
    assert "none of these paths fits 1.00 GiB" in capsys.readouterr().out
    assert {BY_NAME[name].tuning for name, _ in started} == {"full"}


def test_a_failure_is_not_told_as_too_little_memory(no_training, capsys, monkeypatch):
    no_training({})
    monkeypatch.setattr(
        variants, "run", lambda variant, plan, has_gpu: VariantResult(variant.name, "failed", "no such file")
    )
    assert variants.main(["--limit", "1", "lora"]) == 2
    assert "but lora failed for another reason" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qlor"], "unknown variant 'qlor' (did you mean 'qlora'?)"),
        (["--limit", "much"], "limit is 'much'; allowed: GiB such as 3.5, or a size such as 4GB or 900MiB"),
        (["--steps", "1"], "steps is 1; it must be 2 or more"),
        (["--config", "/no/such.yaml"], "cannot read the configuration /no/such.yaml"),
        (["--tuning", "full"], "so it needs --limit and no names of paths; drop it, or add --limit"),
        (["lora", "--limit", "1GB", "--tuning", "full"], "so it needs --limit and no names of paths; drop it\n"),
        (["--color"], "unknown option --color"),
        (["--limt", "4GB"], "unknown option --limt (did you mean '--limit'?)"),
    ],
)
def test_what_a_person_can_fix(no_training, capsys, arguments, words):
    no_training({})
    assert variants.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_the_names_in_the_list_are_whole_on_a_narrow_screen(no_training, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert variants.main(["--list", "full_paged_8bit_adam"]) == 0
    lines = [line[1:].split("│")[0].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert "".join(lines) == "full_paged_8bit_adam"


def test_the_list_says_what_is_missing(no_training, capsys):
    no_training({})
    assert variants.main(["--list", "lora_fp16", "lora"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "needs a GPU" in shown and "can run" in shown
