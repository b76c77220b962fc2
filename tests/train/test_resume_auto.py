"""What ``resume_from_checkpoint: auto`` and a restart by the launcher go on from, and what they leave alone."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
import torch

from scu_trainer.cli import train
from scu_trainer.errors import CheckpointError
from scu_trainer.run_files import RunStatus, write_json
from scu_trainer.train.checkpoints.compatibility import changed_settings
from scu_trainer.train.run_directory import resume as subject
from scu_trainer.train.run_directory.resume import AUTO, Request, Start, decide, newest_checkpoint
from scu_trainer.train.session import session
from scu_trainer.train.trainer import SCUTrainer
from tests import processes, tiny

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED_S = 1_000.0
FSDP = "under FSDP with fsdp_state_dict_type"


def checkpoint(run: Path, step: int, ranks: int = 1) -> Path:
    """As the stock Trainer writes it, as far as anybody looks."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    torch.save({}, folder / "optimizer.pt")
    for name in [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state.pth"]:
        torch.save({"cpu": torch.zeros(5000)}, folder / name)
    write_json(folder / "trainer_state.json", {"global_step": step})
    return folder


def run_at(
    folder: Path, status: str = "running", step: int | None = 100, updated_s: float = 0.0, **description
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    updated = datetime.fromtimestamp(updated_s, UTC).isoformat()
    write_json(folder / "run.json", {"status": status, "step": step, "updated": updated})
    if description:
        write_json(folder / "training_config.json", description)
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def start(output_dir: Path, wanted=AUTO, world_size: int = 1, restarted: bool = False) -> Start:
    return decide(Request(wanted, output_dir, world_size, LAUNCHED_S if restarted else None))


# -- which checkpoint --------------------------------------------------------------------------------------------------


def test_the_newest_by_number_is_taken(tmp_path):
    for step in (9, 100, 20):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path, 1)[0] == tmp_path / "checkpoint-100"
    assert newest_checkpoint(tmp_path / "nowhere", 1)[0] is None


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda folder: (folder / "trainer_state.json").unlink(), "trainer_state.json is missing or incomplete"),
        (
            lambda folder: (folder / "trainer_state.json").write_text('{"global_step"'),
            "trainer_state.json is missing or incomplete",
        ),
        (lambda folder: (folder / "rng_state_1.pth").unlink(), "rng_state_1.pth is missing"),
        (lambda folder: cut(folder / "rng_state_1.pth"), "rng_state_1.pth is damaged"),
        (lambda folder: (folder / "optimizer.pt").unlink(), "no optimizer state"),
    ],
    ids=["no state", "torn state", "no rng of rank 1", "torn rng of rank 1", "no optimizer"],
)
def test_a_checkpoint_that_is_not_whole_is_skipped_and_named(tmp_path, caplog, harm, reason):
    older, newer = checkpoint(tmp_path, 4, ranks=2), checkpoint(tmp_path, 8, ranks=2)
    assert newest_checkpoint(tmp_path, 2)[0] == newer
    harm(newer)
    with caplog.at_level(logging.WARNING, logger="scu_trainer"):
        assert newest_checkpoint(tmp_path, 2)[0] == older
    assert [record.message for record in caplog.records if str(newer) in record.message and reason in record.message]


def test_what_an_earlier_start_left_behind_is_skipped(tmp_path, caplog):
    """Taken back by hand from step 20 to 5, and killed at 7."""
    run = run_at(tmp_path / "run", step=7)
    for step in (5, 20):
        checkpoint(run, step)
    assert start(run).checkpoint == str(run / "checkpoint-5")
    assert "last seen at step 7" in caplog.text


# -- which run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["running", "stopped", "failed", "queued"])
def test_auto_goes_on_with_an_unfinished_run(tmp_path, status):
    run = run_at(tmp_path / "run", status)
    newest = checkpoint(run, 4)
    assert start(run) == Start(run, str(newest), f"resuming from {newest}")


def test_auto_without_a_run_starts_one(tmp_path):
    assert start(tmp_path / "run") == Start(tmp_path / "run")


def test_auto_starts_in_the_directory_of_a_run_that_saved_nothing_whole(tmp_path, caplog):
    run = run_at(tmp_path / "run")
    (run / "checkpoint-2").mkdir()
    begun = start(run)
    assert caplog.text.count("checkpoint-2 is skipped") == 1
    assert (begun.output_dir, begun.checkpoint) == (run, None)
    assert "without a usable checkpoint" in begun.line


def test_auto_names_an_earlier_run_that_has_saved_more_than_the_last(tmp_path):
    first = run_at(tmp_path / "run", updated_s=1.0, start_number=1)
    newest = checkpoint(first, 100)
    last = run_at(tmp_path / "run-2", step=3, updated_s=2.0, start_number=2, output_dir_asked_for="run")
    assert start(first).output_dir == last and start(first).checkpoint is None
    assert f"{first} is unfinished, too: --resume_from_checkpoint {newest} resumes that one" in start(first).line


def test_auto_leaves_a_finished_run_and_a_foreign_directory_alone(tmp_path):
    finished = run_at(tmp_path / "run", "finished")
    checkpoint(finished, 4)
    foreign = checkpoint(tmp_path / "other", 4).parent
    for taken in (finished, foreign):
        begun = start(taken)
        assert begun == Start(taken.with_name(f"{taken.name}-2"), line=begun.line)
        assert "already holds a run; this one goes to" in begun.line


def test_a_folder_of_other_files_is_not_called_a_run(tmp_path):
    for name in "dacb":
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / f"{name}.txt").touch()
    for wanted in (AUTO, None):
        begun = start(tmp_path / "run", wanted)
        assert begun.output_dir == tmp_path / "run-2"
        expected = "holds no run, but other files (a.txt, b.txt, c.txt and 1 more); this one goes to"
        assert f"{tmp_path / 'run'} {expected} {tmp_path / 'run-2'}" == begun.line


def test_auto_goes_on_with_the_run_that_made_way(tmp_path):
    run_at(tmp_path / "run", "finished")
    second = run_at(tmp_path / "run-2", updated_s=1.0, **{subject.ASKED_FOR: "run"})
    newest = checkpoint(second, 4)
    assert start(tmp_path / "run").checkpoint == str(newest)


def test_a_run_of_another_job_is_not_taken_for_ours(tmp_path):
    run_at(tmp_path / "run", "finished")
    checkpoint(run_at(tmp_path / "run-2", updated_s=2_000.0, **{subject.ASKED_FOR: "run-2"}), 4)
    for restarted in (False, True):
        assert start(tmp_path / "run", restarted=restarted).output_dir == tmp_path / "run-3"


@pytest.mark.parametrize(
    ("configuration", "ranks", "told"),
    [
        ({"seed": 1}, 1, None),
        ({"seed": 2}, 1, "(seed 1, now 2)"),
        ({"seed": 1}, 2, "(processes 1, now 2)"),
        (None, 1, "already holds a run"),
    ],
    ids=["the same", "other settings", "other processes", "resume: false"],
)
def test_unasked_only_the_same_run_goes_on(tmp_path, configuration, ranks, told):
    run = run_at(tmp_path / "run", configuration={"seed": 1}, world_size=1)
    newest = checkpoint(run, 4)
    begun = decide(Request(None, run, ranks, configuration=configuration))
    if told is None:
        assert (begun.output_dir, begun.checkpoint) == (run, str(newest))
    else:
        assert (begun.output_dir, begun.checkpoint) == (tmp_path / "run-2", None) and told in begun.line


@pytest.mark.parametrize("wanted", [None, AUTO])
@pytest.mark.parametrize("since", ["running", "finished"])
def test_the_same_run_goes_on_where_another_was_started_since(tmp_path, wanted, since):
    newest = checkpoint(run_at(tmp_path / "run", configuration={"seed": 1}, start_number=1), 4)
    run_at(tmp_path / "run-2", since, configuration={"seed": 2}, start_number=2, **{subject.ASKED_FOR: "run"})
    begun = decide(Request(wanted, tmp_path / "run", 1, configuration={"seed": 1}))
    assert (begun.output_dir, begun.checkpoint) == (tmp_path / "run", str(newest))


@pytest.mark.parametrize("written", ["./rows.jsonl", "{}/rows.jsonl", "../{}/rows.jsonl"])
def test_the_same_path_may_be_written_in_another_way(tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "others.jsonl"):
        (tmp_path / name).touch()
    now = written.format(tmp_path.name if written.startswith("..") else tmp_path)
    assert changed_settings({"dataset": "rows.jsonl"}, {"dataset": now}) == {}
    for other in ("others.jsonl", "gone.jsonl"):
        assert changed_settings({"dataset": other}, {"dataset": now}) == {"dataset": (other, now)}


def test_a_run_that_was_started_over_and_finished_is_not_taken_up_again(tmp_path):
    checkpoint(run_at(tmp_path / "run", configuration={"seed": 1}, start_number=1), 4)
    run_at(tmp_path / "run-2", "finished", configuration={"seed": 1}, start_number=2, **{subject.ASKED_FOR: "run"})
    assert decide(Request(None, tmp_path / "run", 1, configuration={"seed": 1})).output_dir == tmp_path / "run-3"


@pytest.mark.parametrize(
    ("settings", "ranks", "told"),
    [
        ({"learning_rate": 2.0}, 1, "resume_from_checkpoint: auto would resume it"),
        ({}, 2, "to resume it, start as many processes as before, or name its checkpoint in resume_from_checkpoint"),
        ({"tuning": "full"}, 2, "only the settings that it was started with would resume it"),
        ({"seed": 2}, 1, "data_seed: 1 and resume_from_checkpoint: auto would resume it"),
    ],
    ids=["allowed", "processes", "another shape", "rows that were held out"],
)
def test_what_resumes_another_run_is_what_auto_allows(tmp_path, settings, ranks, told):
    own = {"learning_rate": 1.0, "tuning": "lora", "seed": 1, "validation_split_percentage": 5.0, "eval_dataset": None}
    checkpoint(run_at(tmp_path / "run", configuration=own, world_size=1, split_seed=1), 4)
    begun = decide(Request(None, tmp_path / "run", ranks, configuration={**own, **settings}))
    assert f"; {told}; this one goes to" in begun.line
    if "data_seed" in told:
        auto = Request("auto", tmp_path / "run", ranks, configuration={**own, **settings, "data_seed": 1})
        assert decide(auto).checkpoint == str(tmp_path / "run" / "checkpoint-4")


@pytest.mark.parametrize(
    ("saved", "launched", "ranks", "told"),
    [
        ("under ZeRO stage 1 or 2 with 2 processes", "under ZeRO stage 1 or 2 with 1 process", 1, True),
        ("under ZeRO stage 1 or 2 with 2 processes", "under ZeRO stage 3 with 2 processes", 2, True),
        ("under ZeRO stage 1 or 2 with 2 processes", "without DeepSpeed and FSDP", 2, True),
        ("without DeepSpeed and FSDP", "under ZeRO stage 1 or 2 with 2 processes", 2, True),
        ("without DeepSpeed and FSDP", "without DeepSpeed and FSDP", 1, False),
        (f"{FSDP}: FULL_STATE_DICT", "without DeepSpeed and FSDP", 2, True),
        (f"{FSDP}: FULL_STATE_DICT", f"{FSDP}: SHARDED_STATE_DICT", 2, True),
        (f"{FSDP}: FULL_STATE_DICT", f"{FSDP}: FULL_STATE_DICT", 2, False),
        (f"{FSDP}: SHARDED_STATE_DICT", f"{FSDP}: FULL_STATE_DICT", 2, True),
        ("without DeepSpeed and FSDP", f"{FSDP}: SHARDED_STATE_DICT", 2, True),
    ],
)
def test_a_checkpoint_that_only_its_own_launch_reads_is_not_offered_to_another(tmp_path, saved, launched, ranks, told):
    """Naming it, or auto, would end in the refusal of ``check_checkpoint``."""
    own = "pytorch_model_fsdp_0/.metadata" if "SHARDED" in saved else "pytorch_model_fsdp.bin"
    run = run_at(tmp_path / "run", configuration={"scu": True}, world_size=2)
    folder = checkpoint(run, 4, ranks=2)
    for path in [folder / own] if "under FSDP" in saved else ():
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for rank in range(2) if "ZeRO" in saved else ():
        (folder / "latest").write_text("global_step4")
        (folder / "global_step4").mkdir(exist_ok=True)
        (folder / "global_step4" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    request = Request(None, run, ranks, configuration={"scu": False}, launched=launched)
    said = f"; to resume it, start it {saved}, as before; this one goes to"
    assert (said in decide(request).line) == told
    starts_over = launched == "without DeepSpeed and FSDP" and not saved.startswith(FSDP)  # as weights_only asks
    assert (said in decide(replace(request, weights_only=True)).line) == (told and not starts_over)
    if ranks == 1:
        with pytest.raises(CheckpointError, match="; start 2 processes") as refusal:
            decide(replace(request, wanted=AUTO))
        assert ("or name the checkpoint" in str(refusal.value)) != told


def test_another_number_of_processes_is_refused(tmp_path):
    run = run_at(tmp_path / "run", world_size=2)
    assert start(run).checkpoint is None  # nothing to lose yet
    checkpoint(run, 4, ranks=2)
    with pytest.raises(CheckpointError, match="by 2 processes, this launch has 1"):
        start(run)


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_without_auto_only_a_restart_goes_on(tmp_path):
    run = run_at(tmp_path / "run", updated_s=LAUNCHED_S + 5)
    newest = checkpoint(run, 4)
    assert start(run, wanted=None).output_dir == tmp_path / "run-2"
    again = start(run, wanted=None, restarted=True)
    assert (again.output_dir, again.checkpoint) == (run, str(newest))
    assert again.line == f"restarted by the launcher: resuming from {newest}"


def test_a_restart_does_not_take_an_older_run_for_its_own(tmp_path):
    """The launch failed before it made its directory."""
    for status in ("stopped", "finished"):
        run = run_at(tmp_path / status, status, updated_s=LAUNCHED_S - 5)
        checkpoint(run, 4)
        begun = start(run, wanted=None, restarted=True)
        assert (begun.output_dir, begun.is_done) == (run.with_name(f"{status}-2"), False)


@pytest.mark.parametrize("wanted", [None, AUTO])
def test_a_restart_of_a_finished_run_has_nothing_to_do(tmp_path, wanted):
    run = run_at(tmp_path / "run", "finished", updated_s=LAUNCHED_S + 5)
    done = start(run, wanted=wanted, restarted=True)
    assert done.is_done and done.output_dir == run
    assert "nothing is left to do" in done.line


@pytest.mark.parametrize("wanted", [True, "elsewhere/checkpoint-2"])
def test_a_restart_goes_on_after_the_checkpoint_that_was_named(tmp_path, wanted):
    run = run_at(tmp_path / "run", updated_s=LAUNCHED_S + 5)
    assert start(run, wanted, restarted=True).checkpoint == wanted
    newest = checkpoint(run, 4)
    assert start(run, wanted).checkpoint == wanted
    assert start(run, wanted, restarted=True).checkpoint == str(newest)


@pytest.mark.parametrize(
    ("status", "seed", "folder"),
    [("finished", 1, "run-2"), ("stopped", 2, "run-2"), ("stopped", 1, "run")],
    ids=["finished", "another configuration", "its own, unfinished"],
)
def test_a_checkpoint_from_elsewhere_overwrites_no_run(tmp_path, status, seed, folder):
    wanted = str(checkpoint(tmp_path / "elsewhere", 2))
    run = run_at(tmp_path / "run", status, configuration={"seed": seed})
    begun = decide(Request(wanted, run, 1, configuration={"seed": 1}))
    assert (begun.output_dir, begun.checkpoint) == (tmp_path / folder, wanted)
    assert ("this one goes to" in begun.line) == (folder == "run-2")
    own = str(checkpoint(run, 2))  # a run may be taken back to an earlier checkpoint of its own
    assert decide(Request(own, run, 1, configuration={"seed": 1})) == Start(run, own)


def test_a_restart_goes_on_where_a_checkpoint_from_elsewhere_went(tmp_path):
    run_at(tmp_path / "run", "finished")
    beside = run_at(tmp_path / "run-2", updated_s=LAUNCHED_S + 5, start_number=2, output_dir_asked_for="run")
    newest = checkpoint(beside, 4)
    begun = start(tmp_path / "run", "elsewhere/checkpoint-2", restarted=True)
    assert (begun.output_dir, begun.checkpoint) == (beside, str(newest))


def test_a_restart_before_training_takes_nothing_of_the_past_that_the_run_leaves(tmp_path):
    run = run_at(tmp_path / "run", updated_s=LAUNCHED_S + 5, configuration={"resume_from_checkpoint": None})
    wanted, newest = str(checkpoint(run, 2)), str(checkpoint(run, 4))
    assert start(run, wanted, restarted=True).checkpoint == wanted
    write_json(run / "training_config.json", {"configuration": {"resume_from_checkpoint": wanted}})
    assert start(run, wanted, restarted=True).checkpoint == newest


@pytest.mark.parametrize("status", ["stopped", "finished"])
def test_a_checkpoint_of_a_run_that_took_the_place_is_resumed_there(tmp_path, status):
    run = run_at(tmp_path / "run", "finished", start_number=1)
    second = run_at(tmp_path / "run-2", status, start_number=2, **{subject.ASKED_FOR: "run"})
    run_at(tmp_path / "run-3", start_number=3, **{subject.ASKED_FOR: "run"})
    wanted = str(checkpoint(second, 2))
    assert start(run, wanted) == Start(second, wanted)


def test_a_restart_by_weights_alone_goes_on_from_weights_alone(tmp_path):
    run = run_at(tmp_path / "run", updated_s=LAUNCHED_S + 5)
    newest = checkpoint(run, 4)
    (newest / "optimizer.pt").unlink()
    request = Request("elsewhere/checkpoint-2", run, 1, LAUNCHED_S, weights_only=True)
    assert decide(request).checkpoint == str(newest)


def test_a_checkpoint_that_was_rotated_away_since_is_no_error_at_a_restart(tmp_path, monkeypatch):
    training = tiny.arguments(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        subject.check_resumable(training)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    subject.check_resumable(training)


# -- two ranks ---------------------------------------------------------------------------------------------------------

RANK = """
import sys
from pathlib import Path
import torch
from transformers import TrainingArguments
from scu_trainer.errors import CheckpointError
from scu_trainer.train.run_directory import directory_lock
folder, answers = Path(sys.argv[1]), []
for run in ("agree", "refuse"):
    training = TrainingArguments(output_dir=str(folder / run), use_cpu=True, resume_from_checkpoint="auto")
    if training.process_index == 1:
        directory_lock.decide = None  # it must not look for itself
    try:
        answers.append(str(directory_lock.RunDirectoryLock(training).start.checkpoint))
    except CheckpointError as error:
        answers.append(str(error))
(folder / f"answers-{training.process_index}").write_text("\\n".join(answers))
torch.distributed.destroy_process_group()
"""


def test_two_ranks_decide_together(tmp_path):
    newest = checkpoint(run_at(tmp_path / "agree", world_size=2), 4, ranks=2)
    checkpoint(run_at(tmp_path / "refuse", world_size=3), 4, ranks=3)
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    done = processes.run([program, tmp_path], ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = ((tmp_path / f"answers-{rank}").read_text().splitlines() for rank in range(2))
    assert first == second
    assert first[0] == str(newest) and "by 3 processes" in first[1]


def test_a_node_that_was_replaced_learns_of_the_restart(monkeypatch):
    """It counts no restart itself; the oldest launcher tells since when the launch goes on."""
    monkeypatch.setattr(subject, "gather_object", lambda seen: [*seen, (1, 50.0)])
    monkeypatch.setattr(subject, "_launcher_began_s", lambda: 90.0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert subject.restarted_since_s() == 50.0
    monkeypatch.setattr(subject, "gather_object", lambda seen: [*seen, (0, 50.0)])
    assert subject.restarted_since_s() is None
    monkeypatch.setattr(subject, "gather_object", lambda seen: seen)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert subject.restarted_since_s() == 90.0
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert subject.restarted_since_s() is None


# -- through the command -----------------------------------------------------------------------------------------------


@pytest.fixture
def flags(tmp_path) -> list[str]:
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": f"Line {i} of a text. " * 9}) + "\n" for i in range(16)))
    options = {
        "model_name_or_path": tiny.saved_llama(tmp_path / "model", layers=1),
        "dataset": documents,
        "block_size": 32,
        "validation_split_percentage": 0,
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "output_dir": tmp_path / "run",
        "cache_dir": tmp_path / "cache",
        "report_to": "none",
        "use_cpu": "true",
        "predict_memory": "false",
        "resume_from_checkpoint": "auto",
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def test_the_same_command_starts_goes_on_and_begins_the_next(capsys, flags, tmp_path):
    run = tmp_path / "run"
    assert train.main(flags) == 0
    assert "resuming from" not in capsys.readouterr().out
    whole = {name: (run / name).read_bytes() for name in ("adapter_model.safetensors", "scu_history.json")}

    status = json.loads((run / "run.json").read_text())
    assert status["step"] == 4
    write_json(run / "run.json", {**status, "status": "running"})
    (run / "checkpoint-4" / "trainer_state.json").unlink()
    (run / "adapter_model.safetensors").unlink()
    assert train.main(flags) == 0
    printed = capsys.readouterr()
    assert f"resuming from {run / 'checkpoint-2'}" in printed.out
    assert f"{run / 'checkpoint-4'} is skipped" in printed.err
    assert {name: (run / name).read_bytes() for name in whole} == whole
    described = json.loads((run / "training_config.json").read_text())
    assert described["configuration"]["resume_from_checkpoint"] == "auto"

    assert train.main(flags) == 0
    assert "this one goes to" in capsys.readouterr().out
    assert (tmp_path / "run-2" / "scu_metrics.json").is_file()


@pytest.mark.parametrize(
    "refused",
    [["--ema_decay", "0.9"], ["--resume_from_checkpoint", "{run}/checkpoint-2", "--block_size", "16"]],
    ids=["the average is not there", "other rows, from an earlier checkpoint"],
)
def test_a_resume_that_is_refused_leaves_the_run_to_its_own_command(capsys, flags, tmp_path, refused):
    run = tmp_path / "run"
    assert train.main(flags) == 0
    write_json(run / "run.json", {**json.loads((run / "run.json").read_text()), "status": "stopped"})
    described = (run / "training_config.json").read_bytes()
    assert train.main([*flags, *(word.format(run=run) for word in refused)]) == 2
    assert (run / "training_config.json").read_bytes() == described
    assert {path.name for path in run.glob("*checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    capsys.readouterr()
    own = flags[: flags.index("--resume_from_checkpoint")]
    assert train.main(own) == 0
    assert f"resuming from {run / 'checkpoint-4'}" in capsys.readouterr().out


def test_a_restart_of_a_finished_run_ends_at_once(capsys, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert train.main(flags) == 0
    kept = (tmp_path / "run" / "run.json").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    capsys.readouterr()
    assert train.main(flags) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert (tmp_path / "run" / "run.json").read_bytes() == kept
    assert not (tmp_path / "run-2").exists()


def test_run_json_knows_the_step_of_every_checkpoint(flags, tmp_path, monkeypatch):
    """A run that dies right after it saved must not take its newest checkpoint for one of an earlier start."""
    seen, step = [], SCUTrainer.training_step

    def watched(self, *args, **kwargs):
        seen.append(json.loads((tmp_path / "run" / "run.json").read_text())["step"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(SCUTrainer, "training_step", watched)
    monkeypatch.setattr(session, "RunStatus", partial(RunStatus, min_interval_s=1e9))
    assert train.main(flags) == 0
    assert seen == [0, 0, 2, 2]


def test_auto_cannot_go_on_from_weights_alone(capsys, flags):
    assert train.main([*flags, "--save_only_model", "true"]) == 2
    assert "save_only_model" in capsys.readouterr().err
