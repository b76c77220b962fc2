"""Reading what a path cost and did, and judging it; the paths themselves are run by ``make test-smoke``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scu_trainer.runs.studies import variants
from scu_trainer.runs.studies.variant_table import BY_NAME, VARIANTS, Variant
from scu_trainer.runs.studies.variants import VariantPlan, VariantResult, find_violations, loops_of, missing

ALL_ACT = {"regularization": "acts", "memory": "acts", "curriculum": "acts"}


def ran(name: str, peak_mib: int = 100, bpt=(9.0, 8.0), loops=ALL_ACT, device: str = "cpu") -> VariantResult:
    return VariantResult(name, "ran", peak_bytes=peak_mib * 2**20, step_s=1.0, bpt=bpt, loops=loops, device=device)


def test_all_promises_kept():
    assert find_violations([ran("lora"), ran("qlora", 90), VariantResult("lora_fp16", "missing", "needs a GPU")]) == []


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ([ran("lora", bpt=(8.0, 8.0))], "from 8.000 to 8.000"),
        ([ran("lora", loops={**ALL_ACT, "memory": "idle"})], "memory is idle"),
        ([ran("lora", loops={**ALL_ACT, "curriculum": "off"})], "curriculum is off"),
        ([ran("lora"), ran("qlora", 91)], "0.91 of lora's, it should be at most 0.9"),
        ([VariantResult("lora", "failed", "exit code 1: boom")], "boom"),
        ([ran("zero2", 100, device="cuda:0"), ran("zero2_offload", 81, device="cuda:0")], "0.81 of zero2's"),
    ],
)
def test_a_broken_promise_is_named(outcomes, words):
    (found,) = find_violations(outcomes)
    assert words in found


def test_a_job_of_ones_own_may_hold_nothing_out_and_have_loops_off():
    outcome = ran("lora", bpt=None, loops={**ALL_ACT, "curriculum": "off"})
    assert find_violations([outcome], loops_are_on=False) == []
    assert find_violations([outcome]) == ["lora: curriculum is off"]


def test_offload_to_main_memory_promises_nothing_where_the_device_is_main_memory():
    assert find_violations([ran("zero2", 100), ran("zero2_offload", 130)]) == []


def write_run(folder: Path, lam: float, seen: int) -> Path:
    folder.mkdir()
    (folder / "scu_history.json").write_text(json.dumps([{"step": 1, "lambda": lam, "s": 0.1}]))
    (folder / "curriculum.json").write_text(json.dumps([{"epoch": 0, "curriculum": "token_budget", "seen": seen}]))
    return folder


def test_evidence_of_loops_that_act(tmp_path):
    run = write_run(tmp_path / "run", lam=0.5, seen=8)
    assert loops_of(run, {"memory": {"chunks": 4, "windows": 2}}) == ALL_ACT


def test_evidence_of_loops_that_do_not(tmp_path):
    run = write_run(tmp_path / "run", lam=0.0, seen=0)
    idle = dict.fromkeys(ALL_ACT, "idle")
    assert loops_of(run, {"memory": {"chunks": 2, "windows": 2}}) == idle
    (run / "scu_history.json").unlink()
    (run / "curriculum.json").unlink()
    assert loops_of(run, {}) == dict.fromkeys(ALL_ACT, "off")


def test_what_a_machine_lacks_is_one_line(monkeypatch):
    assert "needs a GPU; there it checks: " in missing(BY_NAME["lora_fp16"], has_gpu=False)
    assert missing(BY_NAME["lora_fp16"], has_gpu=True) is None
    monkeypatch.setattr(variants.importlib.util, "find_spec", lambda name: None)
    assert missing(BY_NAME["qlora"], has_gpu=True) == "needs bitsandbytes: pip install 'scu-trainer[qlora]'"


def test_flags_of_a_small_job_share_the_rows_of_a_step(tmp_path):
    plan = VariantPlan(tmp_path / "model", tmp_path)
    for processes, rows in ((1, "4"), (2, "2")):
        flags = plan.flags(processes)
        assert flags[flags.index("--per_device_train_batch_size") + 1] == rows


def test_flags_of_a_job_of_ones_own_only_shorten_it(tmp_path):
    flags = VariantPlan(None, tmp_path, steps=5, config=tmp_path / "my.yaml").flags(1)
    assert flags[:2] == ["--config", str(tmp_path / "my.yaml")]
    assert "--max_steps" in flags and "--dataset" not in flags


def test_nothing_of_a_tree_outlives_its_end():
    import psutil

    process = subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"], start_new_session=True)
    try:
        while len(psutil.Process(process.pid).children()) < 2:
            pass
        children = psutil.Process(process.pid).children()
    finally:
        variants._kill_tree(process)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def finished(code: int, words: str):
    return lambda variant, plan, flags, has_gpu: (code, words)


REFUSING = Variant("zero3_2", "x", refused={"regularization": "works under ZeRO stage 1 and 2"})


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        (2, "error: the regularization loop works under\n ZeRO stage 1 and 2, but this is", "ran"),
        (0, "trained", "failed"),
        (1, "Traceback", "failed"),
    ],
)
def test_a_refusal_is_tried_for_real(monkeypatch, tmp_path, code, words, status):
    monkeypatch.setattr(variants, "_run_command", finished(code, words))
    ((loop, expected),) = REFUSING.refused.items()
    outcome = variants._check_refused(REFUSING, VariantPlan(tmp_path, tmp_path), loop, expected, [], False, ran("x"))
    assert outcome.status == status
    assert (outcome.loops["regularization"] == "refused") == (status == "ran")


def test_a_process_that_fails_is_a_failure_with_its_last_words(monkeypatch, tmp_path):
    monkeypatch.setattr(variants, "_run_command", finished(2, "error: no room"))
    outcome = variants.run(VARIANTS[0], VariantPlan(tmp_path, tmp_path), has_gpu=False)
    assert (outcome.status, outcome.message) == ("failed", "exit code 2: error: no room")
