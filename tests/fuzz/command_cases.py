"""The other commands: folders that are no runs, run files of every wrong kind, options out of range."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from tests.fuzz.site import Site

GARBAGE = (b"", b"{", b"[", b"{}", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"\0" * 50, b"[" * 5000, b"[1, 2]",
        b'[{"step": "x"}]',
           b'[{"step": null, "loss": []}]', b'{"status": 3}', b'{"status": "finished"}',
           b'{"status": "running", "pid": "x"}',
           b'{"status": "running", "pid": -1}', b'{"status": "running", "pid": 1e400}', b'{"configuration": 3}',
           b'{"configuration": {}, "seed": "x", "data": []}', b'{"configuration": {"task": 3}, "seed": 0, "data": {}}',
           b'{"configuration": {"block_size": "x"}, "seed": 0, "data": {}}', b'{"a": NaN}', b"[[1], {}]",
           b"1" * 5000)  # fmt: skip
RUN_FILES = ("run.json", "training_config.json", "scu_history.json", "scu_metrics.json", "memory_history.json",
        "scu_config.json",
             "curriculum.json", "adapter_config.json", "log_history.json", "tokenizer_config.json", "README.md",
             "adapter_model.safetensors", "config.json", "compare.json", "comparison.json",
             "trainer_state.json")  # fmt: skip
NUMBERS = ("nan", "inf", "-inf", "1e400", "1" + "0" * 30, "-1", "0", "x", "", "0.5", "1e-320")
NAMES = ("nowhere", "", ".", "/", "..", "x" * 300, "/dev/null", "a/b/c/d", "~nobody", "base", "no/id", "a b",
        "\udcff", "*",
         "x/" * 3000, "file", "-", "%s")  # fmt: skip


def commands(chance: random.Random, folder: Path, site: Site) -> list[str]:
    (folder / "file").write_text("x")
    run = chance.choice(
        [_garbage_run, _garbage_run, _garbage_run, _empty_run, lambda *_: chance.choice(NAMES), _whole_run]
    )
    name = run(chance, folder, site)
    make = chance.choice(
        [
            _eval,
            _eval,
            _report,
            _report,
            _push,
            _merge,
            _plan,
            _hardware,
            _runs,
            _runs,
            _modes,
            _compare,
            _unknown,
            _variants,
        ]
    )
    return make(chance, folder, site, name)


def _whole_run(chance: random.Random, folder: Path, site: Site) -> str:
    shutil.copytree(site.run, folder / "given" / "run")
    return "given/run"


def _garbage_run(chance: random.Random, folder: Path, site: Site) -> str:
    name = _whole_run(chance, folder, site)
    for file in chance.sample(RUN_FILES, chance.choice((1, 1, 1, 3))):
        path = folder / name / file
        kind = chance.random()
        path.unlink(missing_ok=True)
        if kind < 0.8:
            path.write_bytes(chance.choice(GARBAGE))
        elif kind < 0.9:
            path.mkdir()
    if chance.random() < 0.15:
        return f"{name}/checkpoint-1"
    return name


def _empty_run(chance: random.Random, folder: Path, site: Site) -> str:
    path = folder / "given" / "run"
    path.mkdir(parents=True)
    for file in chance.sample(RUN_FILES, chance.randint(0, 3)):
        (path / file).write_bytes(chance.choice(GARBAGE))
    return "given/run"


def _eval(chance, folder, site, name):
    words = ["eval", name]
    option = chance.choice(
        [
            "confidence",
            "resamples",
            "seed",
            "max_length",
            "stride",
            "batch_tokens",
            "limit",
            "task",
            "tasks",
            "dataset",
            "against",
            "merge_dtype",
            "block_size",
            "num_fewshot",
            None,
            None,
            None,
        ]
    )
    if option in ("dataset", "against"):
        words += [f"--{option}", chance.choice((*NAMES, str(site.rows), "base", "merged"))]
    elif option is not None:
        words.append(f"--{option}={chance.choice(NUMBERS)}")
    return words + chance.choice([[], [], ["--json"]])


def _report(chance, folder, site, name):
    words = ["report", name]
    if chance.random() < 0.3:
        words += ["--output", chance.choice(NAMES)]
    if chance.random() < 0.15:
        words += ["--root", chance.choice(NAMES)]
    if chance.random() < 0.1:
        words.append(f"--watch={chance.choice(('nan', 'inf', '-1', '0', 'x', '1e400'))}")
    return words


def _push(chance, folder, site, name):
    words = [
        "push",
        name,
        "--dry_run",
        "--repo_id",
        chance.choice(["me/mine", "x", "", "a/b/c", "ä/ö", "x" * 300, "-", "a/b"]),
    ]
    if chance.random() < 0.3:
        words += [
            chance.choice(
                [
                    "--merged",
                    "--json",
                    "--base_model=x",
                    "--max_shard_size=0",
                    "--max_shard_size=x",
                    "--nobody",
                    "--max_shard_size=nan",
                    "--max_shard_size=1e400GB",
                    "--license=",
                ]
            )
        ]
    return words


def _merge(chance, folder, site, name):
    words = ["merge", name]
    if chance.random() < 0.4:
        words += ["--output", chance.choice(NAMES)]
    if chance.random() < 0.3:
        words += [f"--max_shard_size={chance.choice((*NUMBERS, '0GB', '5GB', '-5GB'))}"]
    return words


def _plan(chance, folder, site, name):
    words = ["plan", *site.train(output_dir=None)[1:]]
    option = chance.choice(["gpu", "ram", "limit", "config", "model"])
    if option == "model":
        return [*words[:1], f"--model_name_or_path={name or 'x'}", "--use_cpu=true"]
    if option == "config":
        return [*words, "--config", _config(chance, folder, name)]
    value = chance.choice((*NUMBERS, "0GB", "-1GB", "1e400GB", "99999999999999GB", "nanGB", "RTX 9999", "RTX 3050 4GB"))
    return [*words, f"--{option}={value}"]


def _config(chance, folder, name):
    kind = chance.randrange(4)
    if kind == 0:
        return chance.choice(NAMES)
    if kind == 1:
        return f"{name}/training_config.json"
    path = folder / "c.yaml"
    path.write_bytes(chance.choice(GARBAGE))
    return "c.yaml"


def _hardware(chance, folder, site, name):
    kind = chance.randrange(4)
    if kind == 0:
        words = ["hardware", "monitor", chance.choice([name, "99999999", "-5", "0", "1" * 30]), "--duration", "0.2"]
        return [*words, f"--interval={chance.choice(NUMBERS)}"] if chance.random() < 0.5 else words
    if kind == 1:
        return [
            "hardware",
            "monitor",
            f"--duration={chance.choice(('nan', '-1', '0', 'x', '', '-inf'))}",
            f"--csv={chance.choice(NAMES)}",
        ]
    if kind == 2:
        return ["hardware", "check", "--config", _config(chance, folder, name)]
    return [
        "hardware",
        "optimize",
        "--dry_run",
        "--runs",
        chance.choice([name, "given", *NAMES[:8]]),
        "--cache_dir",
        chance.choice(["nowhere", "file", "x" * 300, ""]),
    ]


def _runs(chance, folder, site, name):
    action = chance.choice(["list", "status", "logs", "stop", "start", "nobody", "resume"])
    root = chance.choice(["given", "given", "given", "nowhere", "file", "x" * 300, ""])
    target = chance.choice([name, "run", "run", name])
    if action == "list":
        return ["runs", "list", "--root", root]
    if action == "start":
        options = [
            "--name",
            chance.choice(["../x", "", "a/b", "x" * 300, "-x", "a\nb"]),
            "--nice",
            chance.choice(["0", "x", "99"]),
        ]
        return ["runs", "start", "--config", _config(chance, folder, name), "--root", "nowhere", *options]
    if action == "resume" and target in ("run", "given/run"):
        action = "status"  # it would start one in the background
    words = ["runs", action, target, "--root", root]
    if action == "logs":
        words += ["-n", chance.choice(["x", "-1", "1" * 30, "nan", "5"])]
    if action == "stop":
        words += ["--timeout", chance.choice(["0.1", "nan", "x", "1e400", "-1"])] if chance.random() < 0.9 else []
    return words


def _modes(chance, folder, site, name):
    if chance.random() < 0.5:
        return ["modes", "--mode", chance.choice(["x", "", "tinyy", "nan"])]
    return ["modes", "--mode", "tiny", "--config", _config(chance, folder, name)]


def _variants(chance, folder, site, name):
    return [
        "variants",
        chance.choice(["nobody", "--list"]),
        f"--limit={chance.choice((*NUMBERS, '0GB', 'nanGB'))}",
        "--config",
        _config(chance, folder, name),
    ]


def _compare(chance, folder, site, name):
    kind = chance.randrange(4)
    if kind == 0:
        return ["compare", "--table", name]
    (folder / "job.json").write_text(
        json.dumps(
            {
                "model_name_or_path": str(site.model),
                "dataset": str(site.rows),
                "max_steps": 2,
                "use_cpu": True,
                "block_size": 16,
            }
        )
    )
    config = "job.json" if kind == 1 else _config(chance, folder, name)
    option = chance.choice(
        [
            ["--seeds", chance.choice(NUMBERS)],
            ["--confidence", chance.choice(NUMBERS)],
            ["--jobs", chance.choice(NUMBERS)],
            ["--arms", chance.choice(["", ",", "nobody", "none,none"])],
            ["--arm", chance.choice(["", "x", "x:y", "x:lr=nan", "x:learning_rate=nan", "x:max_steps=1e400", ":a=b"])],
            ["--output_dir", chance.choice(NAMES)],
        ]
    )
    return ["compare", "--config", config, "--dry_run", *option]


def _unknown(chance, folder, site, name):
    return chance.choice(
        [
            ["nobody"],
            ["trian"],
            [""],
            ["eval"],
            ["push"],
            ["report"],
            ["merge"],
            ["runs", "status"],
            ["plan", "x"],
            ["train", "x"],
            ["train", "--nobody"],
            ["train", "--max_steps"],
            ["train", "--config"],
            ["eval", "--json"],
            ["launch", "nobody"],
            ["hardware"],
            ["hardware", "nobody"],
            ["modes", "x"],
            ["train", "--max_steps", "1", "2"],
            ["train", "--", "x"],
            ["train", "--=x"],
            ["train", "-x"],
            ["launch", "accelerate", "--processes", chance.choice(["x", "-1", "0", "nan", "1" * 30])],
        ]
    )
