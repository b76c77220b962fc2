"""The plan of a comparison, written before its first run, so that the same command can resume the comparison.

OUT/plan.json          arms, seeds, threads per run, and all resolved settings of each arm
OUT/arms/ARM.yaml      those settings as a configuration file: later edits of a recipe have no effect
OUT/console/RUN.log    what a run printed
OUT/runs/ARM-seedN/    ordinary run directories
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from scu_trainer.errors import SettingsError, StorageError
from scu_trainer.figures import first_few
from scu_trainer.json_types import first_misfit, misfit
from scu_trainer.run_files import read_json, write_json, write_text
from scu_trainer.runs.studies.comparison_arms import Arm

PLAN_FILE, FORMAT = "plan.json", 1
FIELDS = {
    "command": str, "config": Optional[str], "seeds": list[int], "threads": int, "arms": list[Arm], "resolved": dict,
}  # fmt: skip
"""The fields of the plan that are read, and their types."""

PLACE = frozenset("output_dir run_name seed resume_from_checkpoint".split())
"""Settings that identify a run of an arm and its directory. They may differ between the runs of a comparison."""

BUDGET = (
    "task data_seed dataset dataset_config_name dataset_split dataset_size eval_dataset validation_split_percentage "
    "max_eval_documents block_size packing max_steps num_train_epochs per_device_train_batch_size "
    "gradient_accumulation_steps"
).split()
"""Settings that determine which tokens are trained and scored. They must be the same in all arms."""

SHARED_DATA = ("eval_dataset", "data_seed")
"""Settings that make all seeds use the same held-out documents."""

HOLD_SOMETHING_OUT = "nothing is held out; give eval_dataset or validation_split_percentage above 0"

SELECTING = ("noise_guard", "acmds", "infobatch")


@dataclass(frozen=True)
class ComparisonPlan:
    """What a comparison trains. ``resolved``: all settings of each arm, by name; ``texts``: the same as YAML.

    ``threads``: per run. A resume keeps it, because sums over another number of threads are rounded differently.
    """

    folder: Path
    command: str
    config: Optional[str]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    threads: int
    resolved: dict[str, dict[str, Any]]
    texts: dict[str, str]

    @property
    def runs(self) -> list[tuple[str, int]]:
        """(arm, seed) of each run. All arms of a seed come before the next seed, so that pairs are complete early."""
        return [(arm.name, seed) for seed in self.seeds for arm in self.arms]

    def run_folder(self, arm: str, seed: int) -> Path:
        return self.folder / "runs" / run_name(arm, seed)

    def console(self, arm: str, seed: int) -> Path:
        return self.folder / "console" / f"{run_name(arm, seed)}.log"

    def recipe(self, arm: str) -> Path:
        return self.folder / "arms" / f"{arm}.yaml"


def run_name(arm: str, seed: int) -> str:
    return f"{arm}-seed{seed}"


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return a hash of all settings except PLACE, as 16 hexadecimal digits."""
    acting = {name: value for name, value in settings.items() if name not in PLACE}
    return hashlib.sha256(json.dumps(acting, sort_keys=True).encode()).hexdigest()[:16]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ, except PLACE, each as "name was x, now y"."""
    names = [name for name in {**before, **now} if name not in PLACE]
    return [
        f"{name} was {_shown(before, name)}, now {_shown(now, name)}"
        for name in names
        if before.get(name, ...) != now.get(name, ...)
    ]


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return str(settings[name]) if name in settings else "not there"


# -- what cannot be compared -------------------------------------------------------------------------------------------


def check_comparable(arm: str, settings: Mapping[str, Any]) -> None:
    """Raise SettingsError if an arm would not train the same tokens as the others, or would make choices by the
    held-out loss that is compared. ``settings``: the resolved settings of the arm."""
    if settings.get("push_to_hub"):
        raise SettingsError(
            f"arm {arm} has push_to_hub: true, so all runs would overwrite each other in one repository; drop it, and "
            "upload the run that you choose with scu-trainer push"
        )
    reason = _comparison_obstacle(settings)
    if reason is not None:
        raise SettingsError(f"arm {arm} cannot be compared at equal tokens: {reason}")


def check_steers(arm: Arm, settings: Mapping[str, Any]) -> None:
    """Raise SettingsError if the control law of an arm needs a target for S, but the job sets none."""
    if arm.settings.get("scu_law") in ("model", "original") and settings.get("scu_target_s") is None:
        raise SettingsError(
            f"arm {arm.name} would measure S but not control it, because the job has no scu_target_s; add "
            "--scu_target_s 0.1, or name the target with the arm: --arms none,model:0.1"
        )


def check_equal_budget(resolved: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise SettingsError if arms would train or be scored on different tokens. ``resolved``: the settings by arm."""
    first, expected = next(iter(resolved.items()))
    for arm, settings in resolved.items():
        for name in BUDGET:
            if settings.get(name) != expected.get(name):
                raise SettingsError(
                    f"arm {arm} cannot be compared at equal tokens: its {name} is {settings.get(name)}, but that of "
                    f"{first} is {expected.get(name)}; give --{name} for all arms, or drop it"
                )


def _comparison_obstacle(settings: Mapping[str, Any]) -> Optional[str]:
    if settings.get("scu_stop_at_target"):
        return "scu_stop_at_target ends the run early; set scu_stop_at_target: false"
    if settings.get("scu") and settings.get("scu_target_s") == "auto":
        return "scu_target_s: auto chooses by the held-out loss that is compared here; give a number, such as 0.1"
    selecting = [name for name in str(settings.get("curriculum", "none")).split("+") if name in SELECTING]
    if selecting:
        return f"curriculum {selecting[0]} leaves out rows by their loss; set curriculum: none"
    if settings.get("batch_mode", "chunk") != "chunk":
        return f"batch_mode {settings['batch_mode']} lets memory choose the batch; set batch_mode: chunk"
    if settings.get("auto_find_batch_size"):
        return "auto_find_batch_size repeats rows after an out-of-memory; memory_control does not need it, drop it"
    if settings.get("early_stopping_patience"):  # it turns load_best_model_at_end on, which nobody may have typed
        return "early_stopping_patience ends runs by the held-out loss that is compared here; drop it"
    if settings.get("load_best_model_at_end"):
        return "load_best_model_at_end chooses by the held-out loss that is compared here; drop it"
    return HOLD_SOMETHING_OUT if holds_nothing_out(settings) else None


def holds_nothing_out(settings: Mapping[str, Any]) -> bool:
    share = settings.get("validation_split_percentage")
    return not (settings.get("eval_dataset") or settings.get("streaming") or share is None or share > 0)


# -- the file ----------------------------------------------------------------------------------------------------------


def write_plan(plan: ComparisonPlan) -> None:
    """Write the plan and the recipe of each arm. Raises StorageError."""
    for folder in ("arms", "console", "runs"):
        try:
            (plan.folder / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make {plan.folder / folder}: {error.strerror}; set another output_dir"
            ) from error
    write_recipes(plan)
    write_json(
        plan.folder / PLAN_FILE,
        {
            "format": FORMAT,
            "command": plan.command,
            "config": plan.config,
            "seeds": list(plan.seeds),
            "threads": plan.threads,
            "arms": [asdict(arm) for arm in plan.arms],
            "fingerprints": {name: fingerprint(settings) for name, settings in plan.resolved.items()},
            "resolved": plan.resolved,
        },
    )


def write_recipes(plan: ComparisonPlan) -> None:
    """Write the recipe of each arm, which its runs read. Raises StorageError."""
    for arm in plan.arms:
        write_text(plan.recipe(arm.name), plan.texts[arm.name])


def read_plan(folder: Path) -> Optional[ComparisonPlan]:
    """Return the plan in ``folder``, or None without one. Raises StorageError if this version cannot read it."""
    path = folder / PLAN_FILE
    if not path.is_file():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StorageError(f"{path} is not a comparison plan of this version; move {folder} away")
    try:
        wrong = first_misfit(misfit(found[name], hint, name) for name, hint in FIELDS.items())
        if wrong is not None or found["threads"] < 1:
            raise ValueError(wrong or f"threads is {found['threads']}")
        arms = tuple(Arm(**arm) for arm in found["arms"])
        texts = {arm.name: (folder / "arms" / f"{arm.name}.yaml").read_text() for arm in arms}
        resolved = {arm.name: dict(found["resolved"][arm.name]) for arm in arms}
        seeds, threads = tuple(found["seeds"]), found["threads"]
        return ComparisonPlan(folder, found["command"], found["config"], arms, seeds, threads, resolved, texts)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise StorageError(
            f"{path}, or a file in {folder / 'arms'}, is not as it was written ({error}); restore it from a copy, or "
            f"move {folder} away"
        ) from error


def require_same(before: ComparisonPlan, now: ComparisonPlan) -> None:
    """Raise SettingsError, which names the differences, if the folder holds another comparison. The number of threads
    may differ; the earlier one is kept."""
    found = _changed("seeds", before.seeds, now.seeds)
    found += _changed("arms", [arm.name for arm in before.arms], [arm.name for arm in now.arms])
    for name in before.resolved.keys() & now.resolved.keys():
        if fingerprint(before.resolved[name]) != fingerprint(now.resolved[name]):
            found += [f"{text} (arm {name})" for text in differences(before.resolved[name], now.resolved[name])]
    if found:
        raise SettingsError(
            f"{now.folder} holds another comparison: {first_few(found, between='; ')}; type its command "
            f"({before.command}), or give another --output_dir"
        )


def _changed(what: str, before: Sequence[Any], now: Sequence[Any]) -> list[str]:
    same = sorted(map(str, before)) == sorted(map(str, now))
    return [] if same else [f"{what} were {' '.join(map(str, before))}, now {' '.join(map(str, now))}"]
