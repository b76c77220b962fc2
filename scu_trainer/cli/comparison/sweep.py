"""``scu-trainer sweep``: a small, resumable search with Optuna. Each trial is an ordinary run; a verdict ends it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.comparison import screen as screens
from scu_trainer.cli.comparison.plan import refuse_push, resolved_settings, with_threads_and_devices
from scu_trainer.cli.comparison.runs import ComparisonSession
from scu_trainer.cli.comparison.sweep_plan import BASE, FORM, JOURNAL, SweepPlan, parse_axes, short_value, table_of
from scu_trainer.cli.configuration import check_early, check_values_early
from scu_trainer.cli.fields import parse_with_fields
from scu_trainer.cli.main import guarded, plain_console
from scu_trainer.cli.names.known import known_names
from scu_trainer.cli.names.translation import flags_of, translated
from scu_trainer.cli.parsing import Parser
from scu_trainer.errors import SettingsError, Stopped, StorageError, require_packages
from scu_trainer.figures import UNITS, held_out_size
from scu_trainer.json_types import MALFORMED, first_misfit, misfit
from scu_trainer.run_files import read_object, read_regular, read_rows, require_writable, write_json, write_text
from scu_trainer.runs.launch import environment
from scu_trainer.runs.queue import DeviceQueue, wait_for_turn
from scu_trainer.runs.studies import comparison
from scu_trainer.runs.studies.comparison_arms import Arm
from scu_trainer.runs.studies.comparison_plan import (
    HOLD_SOMETHING_OUT,
    SHARED_DATA,
    ComparisonPlan,
    holds_nothing_out,
)
from scu_trainer.runs.studies.comparison_state import failure_reason, is_finished
from scu_trainer.shipped import recipe
from scu_trainer.stop_signals import StopCounter, stop_signals_to

if TYPE_CHECKING:
    import optuna
    from rich.console import Console

DESCRIPTION = f"""\
Trains the job as it is, then with other values of the fields that --search names, and keeps the trial with the best
held-out bits. A trial that is clearly worse during training ends early. If the sweep is killed or stopped, run the same
command again to continue.

  --search {FORM}"""

BEST, TABLE = "best.yaml", "trials.json"
POLL_EVERY_S, READ_EVERY_S = 0.1, 1.0
TRIALS_BEFORE_PRUNING = 4
FIGURES = dict.fromkeys(("held_out_documents", "held_out_tokens"), Optional[int])
FIGURES |= {"held_out_bpt_after": Optional[dict[str, Any]], **dict.fromkeys(("unit", "item"), Optional[str])}
"""The figures of a run that a sweep reads, and their types."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scu-trainer sweep",
        usage="%(prog)s --config FILE --search AXIS [AXIS ...] [options] [--FIELD VALUE ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=recipe, help="YAML or JSON file of the job")
    parser.add_argument("--search", nargs="+", default=[], metavar="AXIS", help=f"what to search: {FORM}")
    parser.add_argument(
        "--trials", type=int, default=12, metavar="N", help="trials in addition to the job as it is; default: 12"
    )
    parser.add_argument("--output_dir", "--output", default="runs/sweep", metavar="FOLDER", help="default: runs/sweep")
    parser.add_argument(
        "--seed", "--random_seed", type=int, default=0, help="seed of the job and of the search; default: 0"
    )
    parser.add_argument(
        "--confirm_seeds", type=int, default=0, metavar="N",
        help="afterwards, train the job and the best trial with this many other seeds and compare those; default: 0",
    )  # fmt: skip
    return parser


def _translated_search(search: Sequence[str]) -> list[str]:
    """Return the words of --search with names of other programs translated, as in flags."""
    if not all(word.strip("-").find("=") > 0 for word in search):
        return list(search)  # ``parse_axes`` refuses them
    words, read_as = translated([f"--{word.removeprefix('--')}" for word in search], known_names())
    if read_as:
        print(f"read --search {'; '.join(read_as)}")
    return [f"{name}={value}" for name, value in flags_of(words)]


@guarded
def main(argv: list[str], backend: Optional[comparison.ComparisonBackend] = None) -> int:
    options, flags = parse_with_fields(_parser(), argv)
    axes = parse_axes(_translated_search(options.search), known_names())
    for axis in axes:
        for value in axis.ends:
            check_values_early({axis.name: value})
    if options.trials < 1 or options.confirm_seeds < 0:
        raise SettingsError("--trials must be 1 or more, and --confirm_seeds 0 or more")
    typed_names = {name for name, _ in flags_of(translated(flags, known_names())[0])}
    conflicting = [axis.name for axis in axes if axis.name in typed_names]
    if conflicting:
        raise SettingsError(f"{conflicting[0]} is both set and searched; drop one of them")
    check_early(options.config, flags)
    require_packages("sweep", "sweep", ("optuna",), loads=True)
    settings, text = resolved_settings(options.config, [*flags, "--seed", str(options.seed)])
    refuse_push(settings.get("push_to_hub"), "trial")
    is_known = UNITS[settings["task"]] != "label"  # labeled data may bring their own split
    if is_known and holds_nothing_out(settings):
        raise SettingsError(f"a sweep judges by held-out rows: {HOLD_SOMETHING_OUT}")
    command = "scu-trainer sweep " + shlex.join(argv)
    plan = SweepPlan(Path(options.output_dir), command, options.config, flags, axes, options.seed, settings, text)
    return Sweep(plan, options, plain_console(), backend or comparison.ComparisonBackend()).run()


class Sweep(StopCounter):
    """One start of the command, from the lock on its folder to the verdict."""

    def __init__(
        self, plan: SweepPlan, options: argparse.Namespace, console: Console, backend: comparison.ComparisonBackend
    ) -> None:
        self.plan, self.options, self.console, self.backend = plan, options, console, backend
        base_plan = ComparisonPlan(
            plan.folder, plan.command, plan.config, (), (plan.seed,), 1, {"job": dict(plan.settings)}, {}
        )
        self.shared, (self.device,) = with_threads_and_devices(base_plan, 1)

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def run(self) -> int:
        require_writable(self.plan.folder)
        with comparison.exclusive_comparison(self.plan.folder), stop_signals_to(self._receive, self._closed):
            comparison.stop_remaining_runs(self.plan.folder, self.backend)
            self.plan.take()
            with self._place_in_queue():
                self._search()
        return 0

    def _search(self) -> None:
        self._train_base()
        study = self._study()
        self._resume_begun_trials(study)
        combinations = len(self.plan.combinations)
        if 0 < combinations < self.options.trials:
            self.say(f"there are {combinations} combinations of these values: each is tried once")
        while len(study.trials) < min(self.options.trials, combinations or math.inf):
            study.sampler = self._sampler(len(study.trials))
            self._run_trial(study, study.ask())
        self._end(study)

    # -- runs ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _place_in_queue(self) -> Iterator[None]:
        """Hold a place in the queue of background runs, because next to another run a trial would be slow or run out of
        memory. Runs that are started later wait until the sweep has ended."""
        line = DeviceQueue(self.device, machine=self.backend.machine)
        place = line.join(self.backend.machine.identity(), self.plan.folder)
        try:
            wait_for_turn(line, place, lambda: None, self._report_waiting, self._sleep_while_waiting)
            yield
        finally:
            line.leave(place)

    def _report_waiting(self, reason: str) -> None:
        self.say(f"waiting {reason}: a background run has it; scu-trainer runs list shows which")

    def _sleep_while_waiting(self, seconds: float) -> None:
        if self.asked:
            raise Stopped("stopped while waiting; run the same command to continue")
        self.backend.sleep(seconds)

    def folder_of(self, name: str) -> Path:
        return self.plan.folder / "runs" / name

    def _train_base(self) -> None:
        problem = self._problem("base", self._run_watched("base", {}, lambda: False))
        if problem is not None:
            raise SettingsError(f"the job as it is gives nothing to compare trials with: {problem}")
        self.say(f"the job as it is: held-out bits {self._held_out_bits('base'):.4f}")

    def _run_watched(self, name: str, values: Mapping[str, Any], is_hopeless: Any) -> int:
        """Run a training, unless it is finished, and return its exit code; end it early once ``is_hopeless()``. Raises
        Stopped on request."""
        if is_finished(self.folder_of(name)):
            return comparison.TRAINED
        console = self.plan.folder / "console" / f"{name}.log"
        console.parent.mkdir(parents=True, exist_ok=True)
        overrides = [f"--{key}={value}" for key, value in values.items()]
        words = comparison.training_command(self.plan.folder / BASE, self.plan.seed, self.folder_of(name), *overrides)
        process = self.backend.spawn(words, comparison.variables(self.shared, self.device), console)
        forwarded, read_at_s, is_ended = 0, self.backend.clock(), False
        while process.poll() is None:
            if self.asked > forwarded:
                process.terminate() if self.asked < 3 else process.kill()
                forwarded = self.asked
            if not is_ended and self.backend.clock() - read_at_s >= READ_EVERY_S:
                read_at_s, is_ended = self.backend.clock(), is_hopeless()
                if is_ended:
                    process.terminate()
            self.backend.sleep(POLL_EVERY_S)
        if self.asked:
            raise Stopped("stopped; run the same command to continue with the unfinished run")
        return process.poll()

    def _metrics(self, name: str) -> dict[str, Any]:
        path = self.folder_of(name) / "scu_metrics.json"
        found = read_object(path)
        wrong = first_misfit(misfit(found.get(key), hint, key) for key, hint in FIGURES.items()) or misfit(
            (found.get("held_out_bpt_after") or {}).get("value"), float, "held_out_bpt_after.value"
        )
        if wrong is not None:
            raise StorageError(f"{path} holds what no run writes: {wrong}; restore it from a copy")
        return found

    def _held_out_bits(self, name: str) -> Optional[float]:
        value = (self._metrics(name).get("held_out_bpt_after") or {}).get("value")
        return value if value is not None and math.isfinite(value) else None

    def _problem(self, name: str, code: int) -> Optional[str]:
        """Return why a run that has ended has no figure that can be compared; None if it has one."""
        if code != comparison.TRAINED or not is_finished(self.folder_of(name)):
            return failure_reason(self.plan.folder / "console" / f"{name}.log", code)
        if self._held_out_bits(name) is None:
            return "it has no finite held-out figure"
        own, base = (held_out_size(self._metrics(run)) for run in (name, "base"))
        return None if own == base else f"it was scored on {own}, the job as it is on {base}"

    # -- trials --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _optuna(self) -> Any:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna

    def _study(self) -> optuna.Study:
        for stale in self.plan.folder.glob(f"{JOURNAL}.lock*"):  # left by a killed start; we hold the folder's lock
            stale.unlink()
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        path = self.plan.folder / JOURNAL
        self._take_out_half_line(path)
        try:
            study = self._optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(path))),
                study_name="sweep",
                load_if_exists=True,
                pruner=self._optuna.pruners.MedianPruner(n_startup_trials=TRIALS_BEFORE_PRUNING),
            )
            self._require_figures(study)
        except (*MALFORMED, AssertionError, self._optuna.exceptions.OptunaError) as error:
            raise StorageError(
                f"{path} is not as it was written ({type(error).__name__}: {error}); restore it from a copy, or give "
                "another --output_dir"
            ) from error
        return study

    def _take_out_half_line(self, path: Path) -> None:
        """A start that is killed while it writes leaves half a line. Optuna would append the next one to it and could
        not read either; without it, the trial that it belongs to resumes."""
        content = read_regular(path) if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            self.say(f"{path} ended in half a line ({len(content) - len(whole)} bytes), which is taken out")
            os.truncate(path, len(whole))

    def _require_figures(self, study: optuna.Study) -> None:
        """Raise ValueError if a trial that is complete lacks its figure or a value."""
        names = {axis.name for axis in self.plan.axes}
        for trial in study.get_trials(states=(self._optuna.trial.TrialState.COMPLETE,)):
            if not isinstance(trial.value, float) or not math.isfinite(trial.value) or names - trial.params.keys():
                raise ValueError(f"trial {trial.number} is complete, with {trial.value!r:.40} and {trial.params}")

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """Return the sampler for the trial with this number. The number is its seed, so that an interrupted sweep
        continues as it would have without the interruption. If all axes list their values, no combination is tried
        twice; Optuna's GridSampler cannot be used trial by trial."""
        combinations = self.plan.combinations
        sampler = self._optuna.samplers.TPESampler(seed=1000 * self.plan.seed + number)
        if not combinations:
            return sampler
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return self._optuna.samplers.PartialFixedSampler(combinations[number % len(combinations)], sampler)

    def _resume_begun_trials(self, study: optuna.Study) -> None:
        for trial in study.get_trials(states=(self._optuna.trial.TrialState.RUNNING,)):
            self.say(f"trial {trial.number} resumes: an earlier start ended before it was done")
            study.sampler = self._sampler(trial.number)
            self._run_trial(study, self._optuna.trial.Trial(study, trial._trial_id))

    def _run_trial(self, study: optuna.Study, trial: optuna.Trial) -> None:
        values = {axis.name: axis.suggest(trial) for axis in self.plan.axes}
        described = ", ".join(f"{key} {short_value(value)}" for key, value in values.items())
        name = f"trial-{trial.number}"
        code = self._run_watched(name, values, lambda: self._is_hopeless(trial, name))
        problem = self._problem(name, code)
        if problem is None:
            study.tell(trial, self._held_out_bits(name))
            self.say(f"trial {trial.number}: {described}: held-out bits {self._held_out_bits(name):.4f}")
        elif code == Stopped.exit_code:
            study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
            self.say(f"trial {trial.number}: {described}: ended early, worse than half of the others were at that step")
        else:
            study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            self.say(f"trial {trial.number}: {described}: failed: {problem}")

    def _is_hopeless(self, trial: optuna.Trial, name: str) -> bool:
        """Whether the trial should end early, judged by the evaluations that the run has logged so far."""
        path = self.folder_of(name) / "log_history.json"
        known = trial.study.trials[trial.number].intermediate_values
        for row in read_rows(path) if path.is_file() else ():
            if row.get("eval_bpt") is not None and row["step"] not in known:  # None: it was not finite
                trial.report(row["eval_bpt"], row["step"])
        return trial.should_prune()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, study: optuna.Study) -> None:
        done = study.get_trials(states=(self._optuna.trial.TrialState.COMPLETE,))
        rows = [self._row(trial) for trial in study.trials]
        write_json(self.plan.folder / TABLE, rows)
        self.console.print(table_of(rows, self._held_out_bits("base"), [axis.name for axis in self.plan.axes]))
        if not done:
            raise SettingsError("no trial finished; the lines above say why")
        best = min(done, key=lambda trial: trial.value)
        flags = [*self.plan.flags, *(f"--{key}={value}" for key, value in best.params.items())]
        _, text = resolved_settings(self.plan.config, [*flags, "--seed", str(self.plan.seed)])
        write_text(self.plan.folder / BEST, text)
        for line in self._verdict(best.number, len(done)):
            self.say(line)
        self.say(f"written: {self.plan.folder / BEST}, {self.plan.folder / TABLE}")
        if self.options.confirm_seeds:
            self._confirm(best.params)

    def _row(self, trial: Any) -> dict[str, Any]:
        return {
            "trial": trial.number,
            "values": trial.params,
            "state": trial.state.name.lower(),
            "held_out_bpt": trial.value,
            "last_evaluation": max(trial.intermediate_values, default=None),
            "folder": f"runs/trial-{trial.number}",
        }

    def _verdict(self, number: int, count: int) -> list[str]:
        """Compare the best trial with the job as it is by the figure of ``eval``, paired over held-out documents."""
        runs = [str(self.folder_of(name)) for name in ("base", f"trial-{number}")]
        words = [sys.executable, "-m", "scu_trainer.cli.main", "eval", runs[1], "--against", runs[0], "--json"]
        evaluation = subprocess.run(words, capture_output=True, text=True, check=False, env=environment(1, False))
        if evaluation.returncode != 0:
            return [
                f"the best, trial {number}, could not be scored against the job as it is: "
                f"{evaluation.stderr.strip()[-300:]}"
            ]
        report = json.loads(evaluation.stdout)
        difference, is_accuracy = report["against"][0]["difference"], "accuracy" in report["model"]
        scale, number_format, unit = (100, "+.2f", "points of accuracy") if is_accuracy else (1, "+.4f", "bits")
        best = f"best: trial {number}, {scale * difference['value']:{number_format}} {unit} against the job as it is"
        if difference["low"] is None:
            return [f"{best}: one {report['item']} cannot tell"]
        low, high = (f"{scale * difference[name]:{number_format}}" for name in ("low", "high"))
        is_better = difference["low"] > 0 if is_accuracy else difference["high"] < 0
        is_same = difference["low"] <= 0 <= difference["high"]
        verdict = "no difference found" if is_same else ("better" if is_better else "worse")
        lines = [f"{best} ({low} to {high}, {difference['confidence']:.0%} over held-out {report['item']}s): {verdict}"]
        if count > 1:
            lines.append(
                f"it was chosen as the best of {count} on these documents, so its figure is too good on average; "
                "--confirm_seeds 3 trains both again with other seeds"
            )
        return lines

    def _confirm(self, values: Mapping[str, Any]) -> None:
        """Compare job and best trial with other seeds, which hold out other documents unless settings fix them."""
        fixed = [name for name in SHARED_DATA if self.plan.settings.get(name) is not None]
        if fixed:
            screens.print_wrapped(
                self.console,
                f"with {' and '.join(fixed)}, these seeds are scored on the documents that the best was chosen on: the "
                "figures below are still too good on average",
            )
        arms = (Arm("base", "base", "the job as it is", {}), Arm("best", "best", "the best trial", dict(values)))
        resolved, texts = {}, {}
        for arm in arms:
            overrides = ["--seed", str(self.plan.seed + 1), "--resume_from_checkpoint", "auto"]
            resolved[arm.name], texts[arm.name] = resolved_settings(
                self.plan.config, [*self.plan.flags, *arm.flags, *overrides]
            )
        seeds = tuple(range(self.plan.seed + 1, self.plan.seed + 1 + self.options.confirm_seeds))
        folder = self.plan.folder / "confirm"
        plan = ComparisonPlan(folder, self.plan.command, self.plan.config, arms, seeds, 1, resolved, texts)
        plan, devices = with_threads_and_devices(plan, 1)
        ComparisonSession(plan, "base", devices, self.console, self.backend).run()
