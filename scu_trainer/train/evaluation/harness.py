"""Run tasks of lm-evaluation-harness on a loaded model.

Tasks, prompts, metrics and standard errors are those of the harness. This module adds two things: it raises an error
for a task that cannot run before a model is loaded, and it compares two models question by question.
"""

from __future__ import annotations

import contextlib
import logging
import numbers
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from statistics import NormalDist
from typing import Any, Optional

import numpy as np
import torch
from accelerate.utils import patch_environment
from torch import nn

from scu_trainer.errors import DataError, ModelError, RequirementError, SettingsError
from scu_trainer.models.loading.adapters import generation_obstacle
from scu_trainer.train.evaluation.scoring import BootstrapInterval, DocumentScores, bootstrap_accuracy_difference
from scu_trainer.train.step.recovery.snapshot import replaced

NEAREST = 3
"""Number of similar task names that a message suggests for an unknown one."""

GENERATED = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Options with which a task limits the number of generated tokens; the first one with a value is used."""

MEAN = "mean"
"""The harness's name of the aggregation that takes the mean of one number per question."""


@dataclass(frozen=True)
class TaskMetric:
    """One metric of one task. ``value``: as the harness returns it (an accuracy is a share). ``stderr``: its standard
    error, computed by ``stderr_method``; None if the harness has none. ``per_question``: shape (questions,), empty if
    the metric is not a mean."""

    task: str
    metric: str
    filter: str
    value: float
    stderr: Optional[float]
    stderr_method: Optional[str]
    questions: Optional[int]
    num_fewshot: Optional[int]
    version: Any
    is_higher_better: Optional[bool]
    per_question: np.ndarray = field(repr=False, compare=False, default_factory=lambda: np.empty(0))

    @property
    def key(self) -> tuple[str, str, str]:
        return self.task, self.metric, self.filter

    def interval(self, confidence: float) -> Optional[BootstrapInterval]:
        """Return the normal approximation, ``value`` plus and minus a normal quantile times ``stderr``; None without a
        standard error, and if it is 0, because equal results here do not prove equal results for other questions."""
        if not self.stderr:
            return None
        width = NormalDist().inv_cdf(0.5 + confidence / 2) * self.stderr
        return BootstrapInterval(self.value, self.value - width, self.value + width, confidence)


def paired_difference(
    first: TaskMetric, second: TaskMetric, bootstrap_options: dict[str, Any]
) -> Optional[BootstrapInterval]:
    """Return the mean of ``second`` minus that of ``first``, with the same resamples of the questions for both; None if
    the metric is not a mean. ``bootstrap_options``: resamples, confidence and seed of the bootstrap."""
    if not len(first.per_question) or len(first.per_question) != len(second.per_question):
        return None
    ones = np.ones(len(first.per_question), dtype=np.int64)
    scores = (DocumentScores(ones, ones, figure.per_question) for figure in (first, second))
    return bootstrap_accuracy_difference(*scores, **bootstrap_options)


@dataclass
class Harness:
    """Tasks of the harness, and how to run them.

    ``names``: tasks, groups, tags, or patterns with ``*``. ``limit``, ``num_fewshot``, ``include_path``,
    ``apply_chat_template``: as in the harness. ``max_length``: tokens to which questions are truncated; None: the
    positions of the model. ``resamples``: bootstrap resamples for standard errors. ``cuts``: for the most recently
    evaluated model, how many questions were truncated and to how many tokens.
    """

    names: list[str]
    batch_size: int
    num_fewshot: Optional[int] = None
    limit: Optional[float] = None
    include_path: Optional[str] = None
    apply_chat_template: bool = False
    max_length: Optional[int] = None
    resamples: int = 2000
    cuts: tuple[int, int] = (0, 0)
    _manager: Any = None
    _aggregations: dict[tuple[str, str], str] = field(default_factory=dict)
    _generated: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Load the tasks and their data. Raises RequirementError if the package is not installed, SettingsError for an
        unknown name or a task that cannot run, and DataError if the data cannot be read."""
        with _quiet_harness():
            self._manager = _task_manager(self.include_path, self.names)
            self.names = [task for name in self.names for task in _matching_tasks(self._manager, name)]
            for name in self.names:
                with _explained_data_errors(name):
                    tasks = self._manager.load([name])["tasks"]
                for found in tasks.values():
                    _require_runnable(found)
                    self._generated |= _generated_token_limit(found)
                    for metric, rule in found.aggregation().items():
                        rule_name = getattr(rule, "__name__", type(rule).__name__)
                        self._aggregations[found.task_name, metric] = rule_name

    def ask(self, model: nn.Module, tokenizer: Any, precision: str) -> Iterator[TaskMetric]:
        """Evaluate ``model`` and yield its metrics. ``precision``: no, bf16 or fp16 autocast. Raises ModelError if a
        task generates text and the model cannot."""
        if self._generated and (obstacle := generation_obstacle(model)):
            raise ModelError(f"task {next(iter(self._generated))} generates text, but {obstacle}")
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        with _quiet_harness() as log_counter, _explained_out_of_memory(self.batch_size):
            lm = HFLM(
                pretrained=model,
                tokenizer=tokenizer,
                batch_size=self.batch_size,
                max_length=self.max_length,
                softmax_dtype="float32",
                mixed_precision_dtype={"no": None, "bf16": "bfloat16", "fp16": "float16"}[precision],
            )
            self._require_room(lm)
            limit = self.limit if self.limit is None or self.limit < 1 else int(self.limit)
            results = lm_eval.simple_evaluate(
                lm,
                tasks=list(self.names),
                num_fewshot=self.num_fewshot,
                limit=limit,
                bootstrap_iters=max(2, self.resamples),  # a standard deviation needs two
                apply_chat_template=self.apply_chat_template,
                task_manager=self._manager,
            )
        self.cuts = (log_counter.cuts, lm.max_length)
        yield from _task_figures(results, self._aggregations)

    def _require_room(self, lm: Any) -> None:
        """Raise SettingsError if generated tokens leave no room for a question: the harness would fail halfway."""
        for task, tokens in self._generated.items():
            if tokens >= lm.max_length:
                raise SettingsError(
                    f"task {task} generates up to {tokens} tokens, but the model has room for {lm.max_length} "
                    "including the question; lower max_gen_toks in the generation_kwargs of the task"
                )

    def require_template(self, tokenizer: Any, name: str) -> None:
        if self.apply_chat_template and not tokenizer.chat_template:
            raise SettingsError(f"the tokenizer of {name} has no chat template; drop --apply_chat_template")


# -- finding tasks -----------------------------------------------------------------------------------------------------


def _task_manager(include_path: Optional[str], names: list[str]) -> Any:
    """Return the harness's task manager. If ``include_path`` defines all requested tasks, only these are read, because
    reading the thousands of built-in tasks takes seconds."""
    if include_path is not None and not Path(include_path).expanduser().is_dir():
        raise SettingsError(f"include_path {include_path!r} is not a folder; give a folder with YAML files of tasks")
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise RequirementError(
            f"--tasks needs {error.name}, which is not installed; pip install 'scu-trainer[lm-eval]'"
        ) from error
    if include_path is None:
        return TaskManager()
    folder = str(Path(include_path).expanduser())
    custom_tasks = TaskManager(include_path=folder, include_defaults=False)
    return custom_tasks if {*names} <= {*custom_tasks.all_subtasks} else TaskManager(include_path=folder)


def _matching_tasks(manager: Any, name: str) -> list[str]:
    found = manager.match_tasks([name])
    if found:
        return list(found)
    close = get_close_matches(name, manager.all_tasks, n=NEAREST, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else "lm_eval ls tasks lists all tasks"
    raise SettingsError(f"lm-evaluation-harness has no task {name!r}; {hint}")


def _require_runnable(task: Any) -> None:
    """Raise SettingsError for what cannot run here, and for an unknown aggregation, on which the harness would fail
    only after the last question."""
    if getattr(task, "UNSAFE_CODE", False):
        raise SettingsError(f"task {task.task_name} runs code that the model writes; run it with lm_eval, in a sandbox")
    if getattr(task, "MULTIMODAL", False):
        raise SettingsError(f"task {task.task_name} has images, but a language model reads only text; drop it")
    unknown = [metric for metric, rule in task.aggregation().items() if rule is None]
    if unknown:
        raise SettingsError(f"lm_eval does not know the aggregation of {unknown[0]} in task {task.task_name}; use mean")


def _generated_token_limit(task: Any) -> dict[str, int]:
    """Return {task name: most generated tokens} for a task that generates text, else {}; the default is 256."""
    if task.OUTPUT_TYPE != "generate_until":
        return {}
    options = task.config.generation_kwargs or {}
    given = (options.get(name) for name in GENERATED)
    return {task.task_name: int(next((most for most in given if most is not None), 256))}


@contextlib.contextmanager
def _explained_data_errors(name: str) -> Iterator[None]:
    """Turn the many exceptions that the libraries raise for unreadable data or an invalid task file into UserErrors."""
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError

    try:
        yield
    except ModuleNotFoundError as error:
        raise RequirementError(f"task {name} needs {error.name}, which is not installed; pip install it") from error
    except (OSError, DatasetsError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"the data of task {name} cannot be read: {first}; check the connection, or its dataset_path if it is your "
            "own task"
        ) from error
    except (LookupError, TypeError, AttributeError, TemplateError) as error:
        reason = " ".join(str(error).split())
        raise SettingsError(
            f"lm_eval cannot load task {name}: {type(error).__name__}: {reason}; if it is your own task, correct "
            "its YAML file"
        ) from error


@contextlib.contextmanager
def _explained_out_of_memory(batch_size: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(f"out of GPU memory at batch_size {batch_size}; give a smaller --batch_size") from error


class _LogCounter(logging.Handler):
    """Counts how often the harness truncates a question or a batch; passes errors on to the root logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.cuts = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.cuts += "runcat" in str(record.msg)  # Truncating, or Left truncation
        if record.levelno >= logging.ERROR:
            logging.getLogger().handle(record)


@contextlib.contextmanager
def _quiet_harness() -> Iterator[_LogCounter]:
    """Suppress the harness's warnings, which it logs for every model that it did not load, and let it resample in this
    process instead of forks, which are unsafe with threads or a GPU."""
    logger, log_counter = logging.getLogger("lm_eval"), _LogCounter()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with (
            patch_environment(DISABLE_MULTIPROC="1"),
            replaced(logger, "handlers", [log_counter]),
            replaced(logger, "propagate", False),
        ):
            yield log_counter
    finally:
        logger.setLevel(level)


# -- reading its results -----------------------------------------------------------------------------------------------


def _task_figures(results: dict[str, Any], aggregations: dict[tuple[str, str], str]) -> Iterator[TaskMetric]:
    """Yield the metrics of tasks and groups, in the order of the harness."""
    for task, row in {**results["results"], **results.get("groups", {})}.items():
        for name, value in row.items():
            metric, _, filter_name = name.partition(",")
            if not filter_name or metric.endswith("_stderr") or not _is_number(value):
                continue
            stderr, aggregation = row.get(f"{metric}_stderr,{filter_name}"), aggregations.get((task, metric))
            has_stderr = _is_number(stderr)
            yield TaskMetric(
                task=task,
                metric=metric,
                filter=filter_name,
                value=float(value),
                stderr=float(stderr) if has_stderr else None,
                stderr_method=_stderr_method(aggregation) if has_stderr else None,
                questions=results["n-samples"].get(task, {}).get("effective"),
                num_fewshot=results["n-shot"].get(task),
                version=results["versions"].get(task),
                is_higher_better=results["higher_is_better"].get(task, {}).get(metric),
                per_question=np.empty(0) if aggregation != MEAN else _sample_scores(results, task, metric, filter_name),
            )


def _stderr_method(aggregation: Optional[str]) -> str:
    """Return how ``lm_eval.api.metrics.stderr_for_metric`` computes the standard error; a group has no aggregation."""
    if aggregation is None:
        return "pooled over the tasks of the group"
    return "standard deviation / sqrt(questions)" if aggregation == MEAN else "bootstrap over questions"


def _sample_scores(results: dict[str, Any], task: str, metric: str, filter_name: str) -> np.ndarray:
    samples = [row for row in results["samples"].get(task, ()) if row["filter"] == filter_name]
    values = [row.get(metric) for row in samples]
    return np.asarray(values, dtype=np.float64) if all(map(_is_number, values)) else np.empty(0)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)
