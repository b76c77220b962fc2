"""The Trainer's side of the curriculum: epochs as they are planned, losses as they are seen, books of both.

    begin_epoch        losses of all ranks are put together; the epoch is planned from them; its real number of steps
                       takes the place of the nominal one
    batches            delivered batches are counted, and cut while the length warms up
    record             each row's loss, from the forward that trains
    before_scheduler   the learning rate follows the share of the epochs that is done, not the steps counted
    end_epoch          a row of curriculum.json

Nothing here looks into a batch's values but for its padding.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import numpy
import torch
from accelerate.utils import gather_object
from safetensors.numpy import load_file, save_file

from scu_trainer.control import curriculum as control
from scu_trainer.control.difficulty import Difficulty
from scu_trainer.data.numbered import Numbered, NumberedCollator, lengths_of
from scu_trainer.data.samplers import CurriculumSampler
from scu_trainer.errors import CheckpointError, ControlError
from scu_trainer.run_files import write_json
from scu_trainer.settings import CurriculumSettings
from scu_trainer.train.curriculum_rules import refuse, require_enough_epochs
from scu_trainer.train.deliveries import Counts, Deliveries
from scu_trainer.train.row_readings import Reading, RowLosses
from scu_trainer.train.seen_losses import SeenLosses
from scu_trainer.train.suspects import write_suspects

if TYPE_CHECKING:
    from scu_trainer.train.trainer import SCUTrainer

logger = logging.getLogger("scu_trainer")

STATE_FILE = "curriculum_state.json"
ARRAYS_FILE = "curriculum_state.safetensors"

BY_LOSS = ("noise_guard", "acmds", "infobatch")
"""Methods that choose rows by their losses."""


class CurriculumLoop:
    """One training run's curriculum; also the ``Rows`` that ``LossPath`` reports to.

    Raises SettingsError for arguments that would choose samples as well, ControlError for data without numbers.
    """

    def __init__(self, trainer: SCUTrainer, settings: CurriculumSettings) -> None:
        refuse(trainer)
        self.trainer, self.settings = trainer, settings
        self.sampler: Optional[CurriculumSampler] = None
        self.counts, self.totals = Counts(), Counts()
        self.on_row = lambda row: None
        self._seen, self._deliveries = SeenLosses(), Deliveries(trainer.model)
        self._weights: Optional[torch.Tensor] = None
        self.owes_row = False  # of an epoch whose last step was saved before it was booked
        self._first_step = 0  # of this epoch's plan
        self._steps = 0
        self._progress_before = 0.0  # epochs done before this plan's first step
        self._total_steps = 0
        self._classes: Optional[int] = None  # known from the first batch of the first training on
        self._resumed: Optional[tuple[int, float]] = None

    @property
    def needs_losses(self) -> bool:
        return any(method in BY_LOSS for method in self.settings.methods)

    @property
    def difficulty(self) -> Difficulty:
        """With what was seen up to now; on several ranks up to the last checkpoint or end of an epoch."""
        if self.sampler is None:
            raise ControlError("difficulties are known once training has begun: call train() first")
        if self.sampler.world == 1:
            self.gather()
        return self.sampler.difficulty

    # -- how long a run is ---------------------------------------------------------------------------------------------

    def loader(self) -> torch.utils.data.DataLoader:
        trainer, args = self.trainer, self.trainer.args
        rows = trainer.train_dataset
        self.sampler = CurriculumSampler(
            lengths_of(rows, args.length_column_name),
            self.settings,
            rows_per_batch=trainer._train_batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            rank=args.process_index,
            world=args.world_size,
        )
        self.counts, self.totals, self.owes_row, self._resumed = Counts(), Counts(), False, None
        self.sampler.set_epochs(self._epochs())
        self._tell_classes()
        require_enough_epochs(self.settings, self.sampler.epochs)
        if hasattr(rows, "column_names"):
            rows = trainer._remove_unused_columns(rows, description="training")
        own_collator = trainer.data_collator
        trainer.data_collator = NumberedCollator(trainer._get_collator_with_removed_columns(own_collator, "training"))
        try:
            return trainer._get_dataloader(
                dataset=Numbered(rows),
                description="Training",
                batch_size=trainer._train_batch_size,
                sampler_fn=lambda dataset: self.sampler,
                is_training=True,
            )
        finally:
            trainer.data_collator = own_collator

    @property
    def _accumulation(self) -> int:
        return self.trainer.args.gradient_accumulation_steps

    @property
    def _nominal_steps(self) -> int:
        """Optimizer steps of the first epoch: what the learning rate's schedule was made for."""
        return math.ceil(self.sampler.nominal_batches / self._accumulation)

    def _epochs(self) -> float:
        args = self.trainer.args
        return args.max_steps / self._nominal_steps if args.max_steps > 0 else args.num_train_epochs

    def training_values(self, values: tuple) -> tuple:
        """The stock Trainer's, with as many epochs as ``max_steps`` may take when epochs are shorter than the first."""
        self._total_steps = values[-1]
        if self.trainer.args.max_steps <= 0:
            return values
        return (values[-1], *values[1:])

    # -- an epoch ------------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, skipped_batches: int) -> dict[str, int]:
        """Plan it. Returns the real ``steps_in_epoch`` and ``num_update_steps_per_epoch`` of the stock loop."""
        self._look_at_memory()
        plan = self.sampler.plan(epoch)
        self._weights = None
        if plan.weights is not None:
            self._weights = torch.from_numpy(plan.weights).to(self.trainer.args.device)
        batches = plan.micro_batches // self.sampler.world
        self._steps = math.ceil(batches / self._accumulation)
        self._first_step = self.trainer.state.global_step - skipped_batches // self._accumulation
        self._progress_before = float(epoch)
        if self._resumed is not None and self._resumed[0] == epoch:
            self._progress_before = self._resumed[1]
        self._resumed = None
        self._say_length(epoch)
        self._say(plan)
        return {"steps_in_epoch": batches, "num_update_steps_per_epoch": self._steps}

    def _say_length(self, epoch: int) -> None:
        """``max_steps`` as it will be if the epochs to come are like this one."""
        args, state = self.trainer.args, self.trainer.state
        if args.max_steps > 0:
            return
        left = args.num_train_epochs - epoch
        share = min(1.0, left) if self._progress_before == epoch else 1.0
        later = max(0.0, left - 1) * max(self._steps, 1)
        state.max_steps = self._first_step + max(1, math.ceil(share * self._steps)) + math.ceil(later)

    def _say(self, plan: control.Plan) -> None:
        if self.trainer.is_world_process_zero():
            for note in plan.notes:
                logger.warning(note)

    def _look_at_memory(self) -> None:
        if "acmds" not in self.settings.methods or self.trainer.chunked is None:
            return
        loop, lengths = self.trainer.chunked.loop, self.sampler.lengths
        if loop.gauge is not None:
            reading = loop.gauge.read()
            free = [max(0.0, 1.0 - reading.used_bytes / reading.limit_bytes)]
            # In steps of an eighth: the same run on the same machine shall plan the same epochs.
            self.sampler.availability = round(8 * min(self._from_all(free))) / 8
        coefficients = loop.state.cost.coefficients
        self.sampler.costs = None if coefficients is None else coefficients.bytes_of(lengths, lengths**2)

    def _from_all(self, values: list) -> list:
        return values if self.sampler.world == 1 else gather_object(values)

    def batches(self, loader: Iterator[Any]) -> Iterator[Any]:
        return (self._deliveries.pass_on(inputs, self._limit()) for inputs in loader)

    def _limit(self) -> Optional[int]:
        """Tokens per row while the length warms up."""
        if "length_warmup" not in self.settings.methods:
            return None
        wanted = self.settings.length_warmup_steps
        share = min(1.0, wanted if wanted < 1 else wanted / self._total_steps)
        law, longest = replace(self.sampler.law, warmup_share=share), int(self.sampler.lengths.max())
        return control.warmup_limit(law, self.trainer.state.global_step, self._total_steps, longest)

    def before_scheduler(self, step: int, scheduler: Any) -> None:
        """Set the schedule so that its next step stands where the epochs stand. ``step``: counted from 1."""
        if self.trainer.args.max_steps > 0 or not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            return
        nominal, epoch = self._nominal_steps, self.sampler.current.epoch
        done = step - self._first_step
        share = epoch + 1 - self._progress_before
        position = self._progress_before * nominal + done * (share * nominal) / self._steps
        scheduler.last_epoch = (int(position) if position == int(position) else position) - 1

    # -- losses of rows ------------------------------------------------------------------------------------------------

    def found(self, reading: Optional[Reading]) -> None:
        """How the losses of rows are read, known from the first batch on."""
        if reading is None and self.needs_losses:
            raise ControlError(
                f"curriculum {self.settings.curriculum} needs the loss of each row, and this model returns neither "
                'logits beside labels nor losses of shape (rows,); return them as {"loss": ..., "losses": ...}'
            )
        if reading is None:
            logger.warning("the model returns no logits: difficulties stay unknown")
            return
        if not reading.exact and "infobatch" in self.settings.methods:
            raise ControlError(
                "curriculum infobatch weighs rows, and this model's loss is not the sum of its rows' losses as far as "
                'its logits tell; return {"loss": ..., "losses": ...} with losses of shape (rows,)'
            )
        if not reading.exact:
            logger.warning("difficulty is each row's cross-entropy; the loss that is trained has other parts as well")
        if reading.classes is not None and reading.classes > 1:
            self._classes = reading.classes
            self._tell_classes()

    def _tell_classes(self) -> None:
        self.sampler.law = replace(self.sampler.law, classes=self._classes)

    def weights_of(self, ids: torch.Tensor) -> Optional[torch.Tensor]:
        return None if self._weights is None else self._weights[ids]

    def record(self, ids: torch.Tensor, losses: RowLosses) -> None:
        self._seen.record(self.trainer.state.global_step, ids, losses)

    def quarantine(self, ids: torch.Tensor) -> None:
        """Rows without a finite loss: out of this step and out of every later epoch."""
        self._seen.quarantine(self.trainer.state.global_step, ids)

    def gather(self) -> None:
        """Put the losses and counts of all ranks together; every rank calls it at the same place."""
        parts = self._from_all([(*self._seen.drain(), self._deliveries.drain())])
        self.counts = sum((part[-1] for part in parts), self.counts)
        steps, ids, losses, labels = (numpy.concatenate([part[i] for part in parts]) for i in range(4))
        order = numpy.argsort(steps, kind="stable")
        self.sampler.update(ids[order], losses[order], self.sampler.current.epoch, labels[order])

    # -- books ---------------------------------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        """Also when training stops within an epoch. Every rank calls it."""
        self.gather()
        plan, step = self.sampler.current, self.trainer.state.global_step
        difficulty = self.sampler.difficulty
        report = self.sampler.report()
        self.on_row(
            {
                "epoch": plan.epoch + 1,
                "step": step,
                "steps": step - self._first_step,
                "complete": step - self._first_step >= self._steps,
                "curriculum": self.settings.curriculum,
                "seen": int((difficulty.last_epoch == plan.epoch).sum()),
                **asdict(self.counts),
                **report,
            }
        )
        self.totals, self.counts, self.owes_row = self.totals + self.counts, Counts(), False
        if "noise_guard" in self.settings.methods and self.trainer.args.should_save:
            write_suspects(
                Path(self.trainer.args.output_dir),
                self.sampler.suspects(),
                difficulty,
                self.trainer.train_dataset,
                self.trainer.processing_class,
            )

    def figures(self) -> dict[str, Any]:
        """The whole run, for its summary."""
        difficulty, methods = self.sampler.difficulty, self.settings.methods
        return {
            "curriculum": self.settings.curriculum,
            "samples": len(self.sampler.lengths),
            "never_seen": int(((difficulty.observations == 0) & ~difficulty.quarantined).sum()),
            "quarantined": int(difficulty.quarantined.sum()),
            "suspects": len(self.sampler.suspects()) if "noise_guard" in methods else 0,
            **asdict(self.totals),
            "uniform_rows": round(len(self.sampler.lengths) * self._epochs_done),
        }

    @property
    def _epochs_done(self) -> float:
        done = (self.trainer.state.global_step - self._first_step) / self._steps
        return self._progress_before + (self.sampler.current.epoch + 1 - self._progress_before) * done

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Every rank calls it; one writes."""
        self.gather()
        if not self.trainer.args.should_save:
            return
        state, arrays = self.sampler.state_dict()
        state |= {
            "steps_done": self.trainer.state.global_step - self._first_step,
            "steps": self._steps,
            "accumulation": self._accumulation,
            "progress": self._epochs_done,
            "progress_before": self._progress_before,
            "counts": asdict(self.counts),
            "totals": asdict(self.totals),
        }
        write_json(Path(folder) / STATE_FILE, state)
        save_file({name: numpy.array(array, order="C") for name, array in arrays.items()}, Path(folder) / ARRAYS_FILE)

    def resume(self, checkpoint: str) -> tuple[int, int]:
        """(epoch to go on with, micro-batches of it that each rank skips)."""
        path = Path(checkpoint) / STATE_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{checkpoint} holds no {STATE_FILE}: it was written without a curriculum, so what it has seen is not "
                "known; resume without one, or start anew from its weights with model_name_or_path"
            )
        state, arrays = json.loads(path.read_text()), load_file(Path(checkpoint) / ARRAYS_FILE)
        same_steps = state["accumulation"] == self._accumulation
        done = min(state["micro_batches"], state["steps_done"] * state["accumulation"] * state["world"])
        notices = self.sampler.load_state_dict(state, arrays, done)
        for notice in notices:
            logger.warning(notice)
        self.counts, self.totals = Counts(**state["counts"]), Counts(**state["totals"])
        self._steps, self._progress_before = state["steps"], state["progress_before"]
        self._first_step = self.trainer.state.global_step - state["steps_done"]
        if state["steps_done"] >= state["steps"]:
            self.owes_row = self.counts.rows > 0
            return state["epoch"] + 1, 0
        if notices:
            self._resumed = (state["epoch"], state["progress"])
            return state["epoch"], 0
        self._resumed = (state["epoch"], state["progress_before"])
        if not same_steps:
            logger.warning("gradient_accumulation_steps changed: the rest of the epoch takes other steps")
            self._resumed = (state["epoch"], state["progress"])
        return state["epoch"], done // self.sampler.world
