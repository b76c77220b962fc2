"""Tasks of lm-evaluation-harness on a model that is loaded, by the harness's own functions.

Its tasks, prompts, metrics and standard errors are its own. Ours: what it cannot do is said before a model is loaded,
and two models are compared question by question.
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
from scu_trainer.models.loading.adapters import cannot_write
from scu_trainer.train.evaluation.scoring import BootstrapInterval, DocumentScores, bootstrap_accuracy_difference
from scu_trainer.train.step.recovery.snapshot import replaced

NEAREST = 3
"""Names of tasks that a message gives in the place of an unknown one."""

GENERATED = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names by which a task says how many tokens it generates at most; the first that has a value counts."""

MEAN = "mean"
"""What the harness calls the aggregation whose result is the mean of one number per question."""


@dataclass(frozen=True)
class TaskFigure:
    """One metric of one task. ``value`` as the harness gives it (an accuracy is a share), ``stderr``: its standard
    error, None where the harness has none, by ``stderr_method``. ``per_question``: shape (questions,), empty where the
    metric is no mean."""

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
        """Normal approximation: ``value`` plus and minus a quantile of the normal distribution times ``stderr``; None
        where all questions came out alike, which is no proof that all others would."""
        if not self.stderr:
            return None
        width = NormalDist().inv_cdf(0.5 + confidence / 2) * self.stderr
        return BootstrapInterval(self.value, self.value - width, self.value + width, confidence)


def paired_difference(first: TaskFigure, second: TaskFigure, how: dict[str, Any]) -> Optional[BootstrapInterval]:
    """Mean of ``second`` minus that of ``first``, each resample of the questions drawn for both alike; None for a
    metric that is no mean. how: resamples, confidence, seed."""
    if not len(first.per_question) or len(first.per_question) != len(second.per_question):
        return None
    ones = np.ones(len(first.per_question), dtype=np.int64)
    scores = (DocumentScores(ones, ones, figure.per_question) for figure in (first, second))
    return bootstrap_accuracy_difference(*scores, **how)


@dataclass
class Harness:
    """``names``: tasks, groups, tags, or patterns with ``*``. ``limit``, ``num_fewshot``, ``include_path``,
    ``apply_chat_template``: as the harness takes them. ``max_length``: tokens that it cuts questions to; None: the
    positions of the model. ``resamples``: behind a standard error that it finds by bootstrap. ``cuts``: of the model
    that was asked last, how often that was done, and the tokens that were left."""

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
        """Find the tasks and their data. Raises RequirementError without the package, SettingsError for an unknown
        name, DataError where the data cannot be reached."""
        with _quiet():
            self._manager = _task_manager(self.include_path, self.names)
            self.names = [task for name in self.names for task in _matching(self._manager, name)]
            for name in self.names:
                with _data_errors(name):
                    tasks = self._manager.load([name])["tasks"]
                for found in tasks.values():
                    _require_runnable(found)
                    _require_aggregations(found)
                    self._generated |= _most_generated(found)
                    for metric, rule in found.aggregation().items():
                        called = getattr(rule, "__name__", type(rule).__name__)
                        self._aggregations[found.task_name, metric] = called

    def ask(self, model: nn.Module, tokenizer: Any, precision: str) -> Iterator[TaskFigure]:
        """Figures of ``model``. precision: no, bf16 or fp16 autocast. Raises ModelError for one that cannot write."""
        if self._generated and (obstacle := cannot_write(model)):
            raise ModelError(f"task {next(iter(self._generated))} lets the model write, but {obstacle}")
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        with _quiet() as heard, _memory_reported(self.batch_size):
            wrapped = HFLM(
                pretrained=model,
                tokenizer=tokenizer,
                batch_size=self.batch_size,
                max_length=self.max_length,
                softmax_dtype="float32",
                mixed_precision_dtype={"no": None, "bf16": "bfloat16", "fp16": "float16"}[precision],
            )
            self._require_room(wrapped)
            limit = self.limit if self.limit is None or self.limit < 1 else int(self.limit)
            results = lm_eval.simple_evaluate(
                wrapped,
                tasks=list(self.names),
                num_fewshot=self.num_fewshot,
                limit=limit,
                bootstrap_iters=max(2, self.resamples),  # of one there is no deviation
                apply_chat_template=self.apply_chat_template,
                task_manager=self._manager,
            )
        self.cuts = (heard.cuts, wrapped.max_length)
        yield from _figures(results, self._aggregations)

    def _require_room(self, wrapped: Any) -> None:
        """What is generated leaves room for a question; else the harness ends in the middle."""
        for task, tokens in self._generated.items():
            if tokens >= wrapped.max_length:
                raise SettingsError(
                    f"task {task} generates up to {tokens} tokens, and the model takes {wrapped.max_length} with the "
                    "question; lower max_gen_toks, in the generation_kwargs of the task"
                )

    def require_template(self, tokenizer: Any, name: str) -> None:
        if self.apply_chat_template and not tokenizer.chat_template:
            raise SettingsError(f"the tokenizer of {name} has no chat template; drop --apply_chat_template")


# -- finding tasks -----------------------------------------------------------------------------------------------------


def _task_manager(include_path: Optional[str], names: list[str]) -> Any:
    """Knows the tasks of ``include_path`` alone where these are all that is asked for: reading the many thousand others
    takes seconds."""
    if include_path is not None and not Path(include_path).expanduser().is_dir():
        raise SettingsError(f"include_path {include_path!r} is not a folder; give one with YAML files of tasks")
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise RequirementError(
            f"--tasks needs {error.name}, which is not installed; pip install 'scu-trainer[lm-eval]'"
        ) from error
    if include_path is None:
        return TaskManager()
    folder = str(Path(include_path).expanduser())
    own = TaskManager(include_path=folder, include_defaults=False)
    return own if {*names} <= {*own.all_subtasks} else TaskManager(include_path=folder)


def _matching(manager: Any, name: str) -> list[str]:
    found = manager.match_tasks([name])
    if found:
        return list(found)
    close = get_close_matches(name, manager.all_tasks, n=NEAREST, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else "lm_eval ls tasks prints them all"
    raise SettingsError(f"no task of lm-evaluation-harness is called {name!r}; {hint}")


def _require_runnable(task: Any) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise SettingsError(f"task {task.task_name} runs code that the model writes; run it with lm_eval, in a sandbox")
    if getattr(task, "MULTIMODAL", False):
        raise SettingsError(f"task {task.task_name} shows images, and a language model reads text; drop it")


def _require_aggregations(task: Any) -> None:
    """The harness takes a name that it does not know for none, and ends when all questions have been asked."""
    unknown = [metric for metric, rule in task.aggregation().items() if rule is None]
    if unknown:
        raise SettingsError(f"lm_eval does not know the aggregation of {unknown[0]} in task {task.task_name}; try mean")


def _most_generated(task: Any) -> dict[str, int]:
    """Name and tokens of a task that generates; the harness takes 256 where it names none."""
    if task.OUTPUT_TYPE != "generate_until":
        return {}
    options = task.config.generation_kwargs or {}
    given = (options.get(name) for name in GENERATED)
    return {task.task_name: int(next((most for most in given if most is not None), 256))}


@contextlib.contextmanager
def _data_errors(name: str) -> Iterator[None]:
    """The libraries say in many ways that they cannot get hold of data, or make nothing of the file of a task."""
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
            f"lm_eval cannot make a task of {name}: {type(error).__name__}: {reason}; if it is your own task, correct "
            "its YAML file"
        ) from error


@contextlib.contextmanager
def _memory_reported(batch_size: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(f"out of GPU memory at batch_size {batch_size}; give a smaller --batch_size") from error


class _Heard(logging.Handler):
    """Counts how often the harness cuts a question, or a batch of them; what it calls an error goes on to where it
    would have gone."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.cuts = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.cuts += "runcat" in str(record.msg)  # Truncating, or Left truncation
        if record.levelno >= logging.ERROR:
            logging.getLogger().handle(record)


@contextlib.contextmanager
def _quiet() -> Iterator[_Heard]:
    """The harness warns of every model that it did not load itself, and resamples in forks of this process, which
    holds threads and maybe a GPU: in one process, please."""
    logger, heard = logging.getLogger("lm_eval"), _Heard()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with (
            patch_environment(DISABLE_MULTIPROC="1"),
            replaced(logger, "handlers", [heard]),
            replaced(logger, "propagate", False),
        ):
            yield heard
    finally:
        logger.setLevel(level)


# -- reading its results -----------------------------------------------------------------------------------------------


def _figures(results: dict[str, Any], aggregations: dict[tuple[str, str], str]) -> Iterator[TaskFigure]:
    """Of tasks and of groups, in the order of the harness."""
    for task, row in {**results["results"], **results.get("groups", {})}.items():
        for name, value in row.items():
            metric, _, filter_name = name.partition(",")
            if not filter_name or metric.endswith("_stderr") or not _is_number(value):
                continue
            stderr, aggregation = row.get(f"{metric}_stderr,{filter_name}"), aggregations.get((task, metric))
            has_stderr = _is_number(stderr)
            yield TaskFigure(
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
                per_question=np.empty(0) if aggregation != MEAN else _per_question(results, task, metric, filter_name),
            )


def _stderr_method(aggregation: Optional[str]) -> str:
    """How ``lm_eval.api.metrics.stderr_for_metric`` finds it; a group has no aggregation of its own."""
    if aggregation is None:
        return "pooled over the tasks of the group"
    return "standard deviation / sqrt(questions)" if aggregation == MEAN else "bootstrap over questions"


def _per_question(results: dict[str, Any], task: str, metric: str, filter_name: str) -> np.ndarray:
    samples = [row for row in results["samples"].get(task, ()) if row["filter"] == filter_name]
    values = [row.get(metric) for row in samples]
    return np.asarray(values, dtype=np.float64) if all(map(_is_number, values)) else np.empty(0)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)
