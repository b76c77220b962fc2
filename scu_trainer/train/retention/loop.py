"""Retention as a loop: measure how much the model forgets while it learns something else, and keep that to a budget.

on_train_begin   scores the base on the anchor, once per run
batches          adds replayed rows to those of the data
on_step_begin    or sets lambda of the regularization loop
on_step_end      from time to time scores a sample, and the law decides on the effort
on_train_end     scales the update to the budget, and gives the verdict on rows that decided nothing
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy
import torch
from accelerate.utils import broadcast_object_list
from transformers import Trainer

from scu_trainer.control import retention as control
from scu_trainer.data.text.anchor import Anchor
from scu_trainer.errors import CheckpointError, ControlError
from scu_trainer.run_files import write_json
from scu_trainer.settings import RetentionSettings
from scu_trainer.settings.stock import effective_data_seed
from scu_trainer.train.checkpoints.saved_state import read_state, reading
from scu_trainer.train.loop import Loop, run_folder
from scu_trainer.train.retention.choice import SHARDED_WEIGHTS_MESSAGE
from scu_trainer.train.retention.passages import Passages, extra_bits
from scu_trainer.train.retention.replay import Replay
from scu_trainer.train.retention.verdict import Judged, verdict, verdict_lines
from scu_trainer.train.step.costs import wait_for
from scu_trainer.train.step.distributed.sharded import is_sharded

logger = logging.getLogger("scu_trainer")

BASE_FILE = "retain_base.json"
"""File in the run directory and in each checkpoint: the loss of the base on each row of the anchor."""

EARLY = (1, 2, 5)
"""Steps of the first measurements, while it is unknown how fast the model forgets."""

TIMED = (3, 5)
"""First and last step, counted from the start, that are timed to decide how often to measure; earlier ones are slow."""

LARGEST_SHRINK = 0.05
"""Share of the way back to the start that full effort covers in a step at the learning rate of the settings."""

LEVEL_ERRORS = 1.96
"""Standard errors on either side of the logged level: a 95 % band."""


class Retention(Loop):
    """Keeps the loss on ``anchor`` within ``settings.retain_budget_bits`` of that of the model before training.

    Use as ``SCUTrainer(..., callbacks=[Retention(anchor, settings, collate)])``.

    collate: turns rows of ``anchor`` into a batch for the model. base: loads the model that full tuning began with, or
    a continued adapter as it was before, for scaling the update at the end; new adapters need none. own_rows: held-out
    rows of the training task, to measure what scaling costs.

    Raises ControlError if weights are sharded, or if lambda is the actuator and there is no loop to act through.
    """

    name = "retention"
    state_file = "retain_state.json"
    history_file = "retain_history.json"

    def __init__(
        self,
        anchor: Anchor,
        settings: RetentionSettings,
        collate: Callable[[list], Mapping[str, Any]],
        base: Optional[Callable[[], torch.nn.Module]] = None,
        own_rows: Any = None,
    ) -> None:
        self.anchor, self.settings, self.base, self.own_rows = anchor, settings, base, own_rows
        self._collate = collate
        self.config = control.RetentionConfig(settings.retain_budget_bits)

    @property
    def replays(self) -> bool:
        return self.anchor.replayed is not None

    def attach(self, trainer: Trainer) -> None:
        super().attach(trainer)
        if is_sharded(trainer):
            raise ControlError(SHARDED_WEIGHTS_MESSAGE)
        if not self.replays and (trainer.regularizer is None or not trainer.regularizer.steers):
            raise ControlError(
                f"retain acts through lambda ({self.anchor.reason}), but the regularization loop is not steering; "
                "pass regularization=RegularizationSettings(law='fixed'), or more text"
            )

    # -- a training ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        args = self.trainer.args
        self.state = control.initial_state(self.config)
        self.notices: list[str] = []
        self.newest: Optional[dict[str, Any]] = None
        self.judged: Optional[Judged] = None
        parts = {"measured": self.anchor.measured, "unseen": self.anchor.unseen}
        self._parts = {part: Passages(rows, self.trainer, self._collate) for part, rows in parts.items()}
        self._measured = self._parts["measured"]
        self._base: dict[str, numpy.ndarray] = {}
        self._resumed_from: Optional[Path] = None
        self._next_step, self._steps_between, self._sample_start = 1, self.settings.retain_frequency or 0, 0
        usual_rows = control.MOST_ROWS // 2 if self._steps_between else control.FEWEST_ROWS
        self._sample_rows = min(usual_rows, len(self._measured))
        self._timed_from = self._row_s = math.nan
        self.seconds = self._train_s = self.seconds_at_the_ends = 0.0
        if self.replays:
            place = {"rank": args.process_index, "world": args.world_size}
            self.replay = Replay(self.anchor.replayed, self._collate, effective_data_seed(args), **place)

    def resume_position(self, checkpoint: str, position: tuple[int, int]) -> tuple[int, int]:
        self._resumed_from = Path(checkpoint)
        return position

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        started_s, self._step_at_start = time.perf_counter(), state.global_step
        if self._resumed_from is not None:
            self._load_base_scores(self._resumed_from)
        else:
            self._base = {part: found.scored(found.all()) for part, found in self._parts.items()}
            self._require_finite()
        if args.should_save:
            write_json(run_folder(self.trainer) / BASE_FILE, self._base_to_json())
        self.seconds_at_the_ends = time.perf_counter() - started_s
        self._started_s = time.perf_counter()

    def _require_finite(self) -> None:
        for part, scores in self._base.items():
            bad = int((~numpy.isfinite(scores[:, 0])).sum())
            if bad:
                raise ControlError(
                    f"retain: the base gives no finite loss on {bad} of {len(scores)} {part} rows of "
                    f"{self.anchor.name}; use mixed_precision: bf16 or no, or take those rows out"
                )

    def _base_to_json(self) -> dict[str, Any]:
        scores = {part: scores.tolist() for part, scores in self._base.items()}
        return {"anchor": self.anchor.name, "fingerprint": self.anchor.fingerprint, "nats_and_tokens": scores}

    def _load_base_scores(self, checkpoint: Path) -> None:
        """Read the base's scores. They cannot be measured again, because training has already changed the weights."""
        path = next((p for p in (checkpoint / BASE_FILE, checkpoint.parent / BASE_FILE) if p.is_file()), None)
        if path is None:
            raise CheckpointError(
                f"{checkpoint} holds no {BASE_FILE}, and neither does the folder above it: the loss of the base on "
                f"{self.anchor.name} is no longer known; resume without retain, or start over with --no_resume"
            )
        with reading(path):
            found = read_state(path)
            self._require_same_anchor(path, found["fingerprint"])
            base = {part: numpy.array(found["nats_and_tokens"][part], dtype=float) for part in self._parts}
            if any(base[part].shape != (len(rows), 2) for part, rows in self._parts.items()):
                raise ValueError("its rows are not those of the anchor")
        self._base = base

    def _require_same_anchor(self, path: Path, fingerprint: str) -> None:
        if fingerprint != self.anchor.fingerprint:
            raise CheckpointError(
                f"{path} belongs to another text, or to other rows of it, than retain: {self.anchor.name}; resume "
                "with the previous retain settings, block_size and data_seed (or seed), or start over with --no_resume"
            )

    # -- acting --------------------------------------------------------------------------------------------------------

    @property
    def share(self) -> float:
        """Share of replayed rows in a batch."""
        return self.state.effort * self.settings.retain_max_share if self.replays else 0.0

    @property
    def lam(self) -> float:
        """Lambda for the regularization loop; 0 if replay acts."""
        rate = self.trainer.args.learning_rate
        return 0.0 if self.replays or not rate else self.state.effort * LARGEST_SHRINK / rate

    def batches(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        if not self.replays or not self.share:
            return batches
        rows = self.trainer._train_batch_size
        return (self.replay.add_to_batch(inputs, rows, self.share) for inputs in batches)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if not self.replays:
            regularizer = self.trainer.regularizer
            regularizer.state = replace(regularizer.state, lam=self.lam)
        if state.global_step + 1 == self._step_at_start + TIMED[0] and not self._steps_between:
            wait_for(args.device)
            self._timed_from, self._measuring_before = time.perf_counter(), self.seconds

    # -- measuring -----------------------------------------------------------------------------------------------------

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self._step_at_start + TIMED[1]:
            self._choose_frequency(state.max_steps)
        if state.global_step >= self._next_step or state.global_step == state.max_steps:
            with self._timed():
                self._measure(state, control)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        wait_for(self.trainer.args.device)
        started_s = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started_s

    def _choose_frequency(self, max_steps: int) -> None:
        """Decide how often to measure, by the clock of the main process: all ranks must measure at the same steps."""
        if self._steps_between or math.isnan(self._timed_from):
            return
        wait_for(self.trainer.args.device)
        steps = TIMED[1] - TIMED[0] + 1
        step_s = (time.perf_counter() - self._timed_from - (self.seconds - self._measuring_before)) / steps
        done, most_rows = self.trainer.state.global_step, len(self._measured)
        chosen = [control.measurement_schedule(step_s, self._row_s, done, max_steps, most_rows, self.seconds)]
        ((self._steps_between, self._sample_rows),) = broadcast_object_list(chosen)
        self._log(f"retain: {self._sample_rows} rows are measured every {self._steps_between} optimizer steps")

    def _measure(self, state: Any, flow: Any) -> None:
        """Score the next sample of the anchor, let the law decide on the effort, and record the decision."""
        step = state.global_step
        if step <= self.state.step:
            return
        started_s = time.perf_counter()
        numbers = self._measured.sample(self._sample_start, self._sample_rows)
        found = self._measured.scored(numbers)
        self._row_s = (time.perf_counter() - started_s) / len(numbers)
        self._sample_start = (self._sample_start + len(numbers)) % len(self._measured)
        before, after = (self._measured.by_document(numbers, s) for s in (self._base["measured"][numbers], found))
        excess, error = control.mean_excess(*extra_bits(before, after))
        self._next_step = self._step_of_next_measurement(step)
        was = self.state
        self.state = control.decide(
            self.config, was, control.ExcessMeasurement(step, excess, error, self._next_step - step)
        )
        self._record_measurement(step, excess, error, was)
        self._report_lost_budget(was, step, flow)

    def _step_of_next_measurement(self, step: int) -> int:
        early = next((number for number in EARLY if number > step), math.inf)
        usual = step + self._steps_between if self._steps_between else math.inf
        return int(min(early, usual)) if min(early, usual) < math.inf else step + 1

    @property
    def _replayed_rows(self) -> int:
        """Number of rows replayed on all ranks."""
        return self.replay.used * self.replay.world if self.replays else 0

    def _record_measurement(self, step: int, excess: float, error: float, was: control.RetentionState) -> None:
        state = self.state
        band = LEVEL_ERRORS * state.error_bits
        self.newest = {
            "step": step,
            "excess_bits": state.level_bits,
            "low_bits": state.level_bits - band,
            "high_bits": state.level_bits + band,
            "measured_bits": excess if math.isfinite(excess) else None,
            "measured_error_bits": error if math.isfinite(error) else None,
            "growth_bits_per_step": state.growth_bits,
            "share": self.share,
            "lambda": self.lam,
            "replayed_rows": self._replayed_rows,
            "is_lost": state.is_lost,
        }
        self.record(self.newest)
        if state.skipped > was.skipped:
            self._log(f"retain: step {step}: the anchor has no finite loss; the effort stays as it is")

    def _report_lost_budget(self, was: control.RetentionState, step: int, flow: Any) -> None:
        if not self.state.is_lost or was.is_lost:
            return
        most = f"{self.share:.0%} of each batch replayed" if self.replays else f"lambda {self.lam:.3g}"
        text = (
            f"the budget of {self.config.budget_bits:g} bits per token on {self.anchor.name} could not be held from "
            f"step {step} on: {self.state.level_bits:.3f} are lost with {most}. Lower learning_rate, give more of that "
            "text, or a larger retain_budget_bits"
        )
        if self.settings.retain_stop:
            flow.should_training_stop = flow.should_log = flow.should_save = True
            text += "; the run ends here (retain_stop)"
        else:
            text += "; retain_stop: true would end the run here"
        self.notices.append(text)
        self._log(text)

    def _log(self, text: str) -> None:
        if self.trainer.is_world_process_zero():
            logger.warning(text) if text in self.notices else logger.info(text)

    # -- the end -------------------------------------------------------------------------------------------------------

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._train_s = time.perf_counter() - self._started_s
        if self._is_interrupted:
            return
        started_s = time.perf_counter()
        self.judged = verdict(self)
        lines = [*self._noise_notices(), *self.judged.notices]
        self.notices += lines
        for text in lines:
            self._log(text)
        self.seconds_at_the_ends += time.perf_counter() - started_s

    def _noise_notices(self) -> list[str]:
        error, budget = self.state.error_bits, self.config.budget_bits
        if not self.state.measurements or error <= budget / 2:
            return []
        return [
            f"during training, the loss on the text to be preserved was known only to within {error:.4f} bits per "
            f"token, and the budget is {budget:g}: the loop acted partly on noise. Measure more often "
            "(retain_frequency) or allow a larger budget"
        ]

    @property
    def _is_interrupted(self) -> bool:
        """Whether a signal stopped the run after a checkpoint; it will resume later, and time is short now."""
        callbacks = self.trainer.callback_handler.callbacks
        return any(getattr(callback, "stopped_at", None) is not None for callback in callbacks)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "law": self.state.to_dict(),
            "next_step": self._next_step,
            "every": self._steps_between,
            "sample_rows": self._sample_rows,
            "measured": self._sample_start,
            "replayed": self._replayed_rows,
            "owed": self.replay.owed if self.replays else 0.0,
            "fingerprint": self.anchor.fingerprint,
            "notices": list(self.notices),
            "newest": self.newest,
        }

    def save_state(self, folder: str) -> None:
        super().save_state(folder)
        if self.trainer.args.should_save:
            write_json(Path(folder) / BASE_FILE, self._base_to_json())

    def load_state(self, checkpoint: str) -> None:
        if not (Path(checkpoint) / self.state_file).is_file():
            raise CheckpointError(
                f"{checkpoint} holds no {self.state_file}: it was written without retain; resume without it, or start "
                "over from its weights with model_name_or_path, which then become the base"
            )
        super().load_state(checkpoint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_same_anchor(Path(self.state_file), state["fingerprint"])
        self.state = control.RetentionState.from_dict(state["law"])
        self._next_step, self._sample_start = state["next_step"], state["measured"]
        self._steps_between = self.settings.retain_frequency or state["every"]
        self._sample_rows = state["sample_rows"]
        self.notices, self.newest = list(state["notices"]), state.get("newest")  # older checkpoints do not hold it
        if self.replays:
            # The number of ranks may have changed: rounded up, so that no row repeats before all were used.
            self.replay.used, self.replay.owed = -(-state["replayed"] // self.replay.world), state["owed"]

    # -- reports -------------------------------------------------------------------------------------------------------

    def opening_lines(self) -> list[str]:
        counts, settings = self.anchor.documents, self.settings
        acts = (
            f"replay of {len(self.anchor.replayed):,} rows, up to {settings.retain_max_share:.0%} of a batch, which "
            "come on top of its own"
            if self.replays
            else "lambda"
        )
        return [
            f"retain: at most {settings.retain_budget_bits:g} bits per token lost on {self.anchor.name}, by {acts} "
            f"({self.anchor.reason}); {counts['measured']} of its documents are measured, {counts['replayed']} may be "
            f"replayed, {counts['unseen']} give the verdict"
            + (f"; {counts['in_the_data']} are in the training data and left out" if counts["in_the_data"] else "")
        ]

    def scalars(self) -> dict[str, float]:
        names = ("excess_bits", "high_bits", "share" if self.replays else "lambda")
        return {} if self.newest is None else {f"retain/{name}": self.newest[name] for name in names}

    def figures(self) -> dict[str, Any]:
        figures = {
            "anchor": self.anchor.name,
            "documents": self.anchor.documents,
            "budget_bits": self.config.budget_bits,
            "actuator": "replay" if self.replays else "lambda",
            "reason": self.anchor.reason,
            "measurements": self.state.measurements,
            "skipped_measurements": self.state.skipped,
            "steps_between_measurements": self._steps_between,
            "rows_of_a_measurement": self._sample_rows,
            "replayed_rows": self._replayed_rows,
            "held_while_training": self.state.level_bits <= self.config.budget_bits,
            "is_lost": self.state.is_lost,
            "error_bits": self.state.error_bits,
            "last": self.newest,
            "overhead_fraction": self.seconds / self._train_s if self.seconds and self._train_s else None,
            "seconds_before_and_after": self.seconds_at_the_ends,
            "notices": list(self.notices),
        }
        return {self.name: {**figures, **({} if self.judged is None else self.judged.figures)}}

    def lines(self, figures: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        return verdict_lines(figures[self.name])
