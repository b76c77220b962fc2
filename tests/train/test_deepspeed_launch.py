"""The command under real launchers: deepspeed, accelerate launch, plain python; one process and two.

This file is also the program that runs every configuration in turn.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import processes, tiny

pytest.importorskip("deepspeed")

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = ["The cat sat on the mat and looked at the door.", "A list is a sequence that can be changed in place."]
STEPS, SAVE_AT, ROWS = 4, 2, 4
"""Optimizer steps, the one with a checkpoint, rows per step over all processes."""

STAGES = {"zero2": 2, "zero2_offload": 2, "zero3": 3, "zero3_offload": 3}
ADAPTERS = {1: tuple(STAGES), 2: ("zero2", "zero3_offload")}
WHOLE = {1: ("zero2_offload", "zero3", "zero3_offload"), 2: ("zero3",)}
"""By number of processes: configurations that train adapters, and that train all weights."""

HALF = {"zero3_offload": {"mixed_precision": "bf16", "bf16": "true"}}
"""Configurations whose full tuning computes in bfloat16."""

LOOPS = {"scu_target_s": 0.01, "token_cap": 64, "curriculum": "token_budget"}
"""Weights move enough in four steps for lambda to act; rows of 64 tokens go one by one."""

RECIPE = ROOT / "recipes" / "deepspeed.yaml"
FROM_RECIPE = ("scu", "report_to", "sample_prompts", "predict_memory")
"""Flags that are left to the recipe and to what a run does by itself."""


def flags(folder: Path, name: str, processes: int = 1, deepspeed: str | None = None, **changes) -> list[str]:
    """A short run of the tiny model in ``folder``; with ``processes`` the same rows make up a step."""
    options = {
        "model_name_or_path": folder / "model",
        "dataset": folder / "documents.jsonl",
        "block_size": 64,
        "validation_split_percentage": 25,
        "max_steps": STEPS,
        "save_steps": SAVE_AT,
        "per_device_train_batch_size": ROWS // processes,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "output_dir": folder / name,
        "cache_dir": folder / "cache",
        "report_to": "none",
        "mixed_precision": "no",
        "use_cpu": "true",
        "scu": "false",
        "sample_prompts": 0,
        "predict_memory": "false",
        **({} if deepspeed is None else {"deepspeed": ROOT / "ds_configs" / f"{deepspeed}.json"}),
        **changes,
    }
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def result(folder: Path, name: str) -> dict:
    """What a run left: losses of its steps, held-out figures, weights of its last checkpoint and of its model."""
    run = folder / name
    state = json.loads((run / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    figures = json.loads((run / "scu_metrics.json").read_text())
    return {
        "losses": [row["loss"] for row in state["log_history"] if "loss" in row],
        "held_out": [figures[f"held_out_bpt_{when}"]["value"] for when in ("before", "after")],
        "weights": saved_weights(run),
    }


def saved_weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (file,) = [*run.glob("adapter_model.safetensors"), *run.glob("model.safetensors")]
    return load_file(file)


def optimizer_states(run: Path) -> list[Path]:
    """Files of DeepSpeed in the last checkpoint, one per rank."""
    return [*run.glob(f"checkpoint-{STEPS}/global_step{STEPS}/*optim_states.pt")]


# -- the program -------------------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    """Every configuration: adapters, saved, resumed; all weights; the loops. One file of findings per rank."""
    import gc

    from scu_trainer.train.step.distributed.deepspeed_start import leave_process_group, prepare_environment

    prepare_environment(str(ROOT / "ds_configs" / "zero2.json"), use_cpu=True)
    gc.freeze()
    found = {}
    world = int(os.environ["WORLD_SIZE"])
    for name in ADAPTERS[world]:
        found[name] = run(folder, f"{name}-{world}", world, name)
        if world == 1:
            found[f"{name} resumed"] = resumed(folder, f"{name}-{world}", name)
    for name in WHOLE[world]:
        # Under ZeRO-3 scu without a target is a line, and training goes on.
        changes = {"tuning": "full", "scu": str(name == "zero3").lower(), **HALF.get(name, {})}
        found[f"{name} full"] = run(folder, f"{name}-full-{world}", world, name, **changes)
    found["loops"] = run(folder, f"loops-{world}", world, "zero2", scu="true", **LOOPS)
    if world == 1:
        found["refused"] = refused(folder)
    torch.save(found, folder / f"found-{world}-{os.environ['RANK']}.pt")
    leave_process_group(succeeded=True)


def run(folder: Path, name: str, world: int, deepspeed: str, **changes) -> dict:
    from scu_trainer.cli import configuration
    from scu_trainer.train.session import session

    trainers, build = [], session.build_trainer
    session.build_trainer = lambda *arguments: trainers.append(build(*arguments)) or trainers[-1]
    try:
        session.run(configuration.read_job(None, flags(folder, name, world, deepspeed, **changes)))
    finally:
        session.build_trainer = build
    return engine_facts(trainers[0])


def resumed(folder: Path, name: str, deepspeed: str) -> dict[str, torch.Tensor]:
    """Weights after going on from the checkpoint in the middle."""
    checkpoint = folder / name / f"checkpoint-{SAVE_AT}"
    changes = {"output_dir": folder / f"{name}-resumed", "resume_from_checkpoint": checkpoint, "allow_pickle": "true"}
    run(folder, name, 1, deepspeed, **changes)
    return saved_weights(folder / f"{name}-resumed")


def refused(folder: Path) -> tuple[int, str]:
    """Exit code and last line of the command where the loop cannot run; the model is not even there."""
    from scu_trainer.cli import train

    asked = {"scu": "true", "scu_target_s": 0.1, "model_name_or_path": folder / "no model"}
    words = flags(folder, "refused", deepspeed="zero3", **asked)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = train.main(words)
    return code, said.getvalue().strip().splitlines()[-1]


def engine_facts(trainer) -> dict:
    engine = trainer.model_wrapped
    zero = engine.config["zero_optimization"]
    return {
        "engine": type(engine).__name__,
        "stage": int(engine.zero_optimization_stage()),
        "world": torch.distributed.get_world_size(),
        "optimizer": type(engine.basic_optimizer).__name__,
        "offloaded": {name: zero[name]["device"] for name in ("offload_optimizer", "offload_param") if name in zero},
        "dtypes": {str(weight.dtype) for weight in engine.module.parameters()},
        "loops": [trainer.regularizer is not None, trainer.micro_batches is not None, trainer.curriculum is not None],
    }


# -- launches ----------------------------------------------------------------------------------------------------------


def launched(folder: Path, command: list, *words: str, from_nothing: bool = False) -> None:
    """A launch that works. Extensions have a place of their own, and nothing may be built there.

    ``from_nothing``: as a program of its own whose every process imports everything.
    """
    builds = folder / "builds"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    environment |= {"TORCH_EXTENSIONS_DIR": str(builds), "PYTHONPATH": str(ROOT)}
    command = [*map(str, command), *words]
    if from_nothing:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    else:
        done = processes.launch(command, environment=environment)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert not builds.exists() or not any(builds.rglob("*.so"))


def installed(name: str) -> Path:
    return Path(sys.executable).parent / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    tiny.saved_llama(folder / "model", layers=1)
    rows = [{"text": f"{SENTENCES[i % 2]} Number {i}. " * 6} for i in range(24)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def plain(folder: Path, name: str, **changes) -> dict:
    from scu_trainer.cli import train

    assert train.main(flags(folder, name, **changes)) == 0
    return result(folder, name)


@pytest.fixture(scope="module")
def stock(folder):
    """By what is trained: the run without DeepSpeed."""
    return {
        "lora": plain(folder, "plain"),
        "full": plain(folder, "plain-full", tuning="full"),
        "loops": plain(folder, "plain-loops", scu="true", **LOOPS),
    }


@pytest.fixture(scope="module")
def one(folder):
    """Plain python, without a launcher."""
    done = processes.run([__file__, folder], timeout=280)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return torch.load(folder / "found-1-0.pt")


@pytest.fixture(scope="module")
def two(folder):
    launched(folder, [installed("deepspeed"), "--num_accelerators", 2, __file__, folder])
    return [torch.load(folder / f"found-2-{rank}.pt") for rank in range(2)]


@pytest.fixture
def findings(request):
    """Number of processes -> what each rank found."""
    return lambda world: [request.getfixturevalue("one")] if world == 1 else request.getfixturevalue("two")


def each(cases: dict[int, tuple[str, ...]]) -> list[tuple[int, str]]:
    return [(world, name) for world, names in cases.items() for name in names]


@pytest.mark.parametrize(("world", "name"), each(ADAPTERS))
def test_every_configuration_starts_what_it_says(findings, world, name):
    for found in findings(world):
        facts = found[name]
        assert (facts["engine"], facts["stage"]) == ("DeepSpeedEngine", STAGES[name])
        assert facts["world"] == world
        assert facts["optimizer"] == "AdamW"  # torch's: nothing has to be compiled
        parts = [] if "offload" not in name else ["offload_optimizer", "offload_param"][: STAGES[name] - 1]
        assert facts["offloaded"] == dict.fromkeys(parts, "cpu")
        assert facts["dtypes"] == {"torch.float32"}


@pytest.mark.parametrize(("world", "name"), each(ADAPTERS))
def test_losses_and_scores_are_those_of_the_plain_run(findings, folder, stock, world, name):
    assert findings(world)
    mine = result(folder, f"{name}-{world}")
    assert mine["losses"] == pytest.approx(stock["lora"]["losses"], abs=5e-5)
    assert mine["held_out"] == pytest.approx(stock["lora"]["held_out"], abs=5e-5)


@pytest.mark.parametrize("name", ADAPTERS[2])
def test_each_rank_saves_its_part_of_the_optimizer(two, folder, name):
    assert len(optimizer_states(folder / f"{name}-2")) == 2


@pytest.mark.parametrize("name", ADAPTERS[1])
def test_a_resumed_run_ends_with_the_same_weights(one, folder, name):
    assert tiny.same(one[f"{name} resumed"], saved_weights(folder / f"{name}-1"))


@pytest.mark.parametrize("name", ADAPTERS[1])
def test_a_resumed_run_says_how_it_began(one, folder, name):
    """Under ZeRO-3 a model comes to its place only with the weights of the checkpoint in it."""
    files = (folder / f"{name}-{end}" / "scu_metrics.json" for end in ("1", "1-resumed"))
    whole, resumed = (json.loads(file.read_text())["held_out_bpt_change"] for file in files)
    assert resumed == whole


@pytest.mark.parametrize(("world", "name"), [case for case in each(WHOLE) if case[1] not in HALF])
def test_stock_transformers_load_the_consolidated_model(findings, folder, stock, world, name):
    from transformers import AutoModelForCausalLM

    assert findings(world) and stock["full"]["losses"][0] > stock["full"]["losses"][-1]
    tokens = torch.arange(3, 35)[None]
    mine, theirs = (
        AutoModelForCausalLM.from_pretrained(folder / run)(tokens).logits
        for run in (f"{name}-full-{world}", "plain-full")
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_bf16_converts_the_weights(one, folder, stock):
    """DeepSpeed keeps float32 masters and computes in bfloat16; the model is saved as it computes."""
    (name,) = HALF
    assert one[f"{name} full"]["dtypes"] == {"torch.bfloat16"}
    mine = result(folder, f"{name}-full-1")
    assert mine["losses"] == pytest.approx(stock["full"]["losses"], rel=1e-2)
    assert {weight.dtype for weight in mine["weights"].values()} == {torch.bfloat16}


@pytest.mark.parametrize("world", [1, 2])
def test_all_three_loops_run_under_zero_2(findings, folder, stock, world):
    assert all(found["loops"]["loops"] == [True, True, True] for found in findings(world))
    mine = result(folder, f"loops-{world}")
    if world == 1:  # two ranks fill batches of equal tokens from halves of the rows
        assert mine["losses"] == pytest.approx(stock["loops"]["losses"], abs=5e-5)
    assert mine["losses"][-1] < mine["losses"][0]


def from_recipe(folder: Path, name: str) -> list[str]:
    """Model, data and length are overridden; kind of tuning, loop, schedule and DeepSpeed are the recipe's."""
    given = flags(folder, name)
    pairs = zip(given[::2], given[1::2], strict=True)
    return [word for flag, value in pairs if flag.removeprefix("--") not in FROM_RECIPE for word in (flag, value)]


def test_deepspeed_starts_the_recipe(folder):
    from scu_trainer.cli import train

    alone = folder / "alone.yaml"
    alone.write_text("".join(line for line in RECIPE.read_text().splitlines(True) if not line.startswith("deepspeed:")))
    assert train.main(["--config", str(alone), *from_recipe(folder, "recipe-alone")]) == 0
    command = [installed("deepspeed"), "--num_gpus", 1, "scripts/train.py", "--config", RECIPE]
    launched(folder, command, *from_recipe(folder, "by-deepspeed"), from_nothing=True)
    mine, alone = result(folder, "by-deepspeed"), result(folder, "recipe-alone")
    assert mine["losses"] == pytest.approx(alone["losses"], abs=5e-5)
    assert mine["held_out"] == pytest.approx(alone["held_out"], abs=5e-5)
    assert mine["weights"].keys() == alone["weights"].keys() and "lm_head.weight" in mine["weights"]
    run = folder / "by-deepspeed"
    assert len(json.loads((run / "scu_metrics.json").read_text())["regularization"]) > 0
    assert len(optimizer_states(run)) == 1


def test_accelerate_starts_the_script(folder, stock):
    launcher = [installed("accelerate"), "launch", "--config_file", "accelerate_configs/deepspeed_zero3.yaml"]
    launched(folder, [*launcher, "--num_processes", 1, "scripts/train.py"], *flags(folder, "by-accelerate"))
    assert result(folder, "by-accelerate")["losses"] == pytest.approx(stock["lora"]["losses"], abs=5e-5)
    assert len(optimizer_states(folder / "by-accelerate")) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_s_alone_is_left_out_under_zero_3(findings, folder, world):
    figures = json.loads((folder / f"zero3-full-{world}" / "scu_metrics.json").read_text())
    assert figures["regularization"]["verdict"] == "not measured"
    assert "this is stage 3" in figures["regularization"]["notices"][0]
    notices = json.loads((folder / f"zero3-full-{world}" / "run.json").read_text())["notices"]
    assert figures["regularization"]["notices"][0] in notices


def test_regularization_under_zero_3_is_refused_before_a_model_is_loaded(one, folder):
    code, message = one["refused"]
    assert code == 2
    assert message.startswith("error: the regularization loop works under ZeRO stage 1 and 2, but this is stage 3")
    assert not (folder / "refused").exists()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))  # the launcher puts --local_rank in front
