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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import numpy
import torch
from accelerate.utils import gather_object
from safetensors.numpy import load_file, save_file
from transformers.trainer_utils import has_length

from scu_trainer.control import curriculum as control
from scu_trainer.control.difficulty import Difficulty
from scu_trainer.data.numbered import Numbered, NumberedCollator, lengths_of
from scu_trainer.data.samplers import CurriculumSampler
from scu_trainer.errors import CheckpointError, ControlError, NonFiniteLoss, SettingsError
from scu_trainer.run_files import write_json
from scu_trainer.settings import CurriculumSettings
from scu_trainer.train.row_readings import Reading
from scu_trainer.train.rows import PADDING, follows_time, layout_for

if TYPE_CHECKING:
    from scu_trainer.train.trainer import SCUTrainer

logger = logging.getLogger("scu_trainer")

STATE_FILE = "curriculum_state.json"
ARRAYS_FILE = "curriculum_state.safetensors"

BY_LOSS = ("noise_guard", "acmds", "infobatch")
"""Methods that choose rows by their losses."""

MOST_BAD_ROWS = 16
"""Rows in a row without a finite loss from which on it is the model and not the data."""

FEWEST_EPOCHS_TO_PRUNE = 4


@dataclass
class Counts:
    """What was delivered in this epoch, over all ranks once gathered. Tokens are rows for inputs without a length."""

    rows: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    cut_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class CurriculumLoop:
    """One training run's curriculum; also the ``Rows`` that ``LossPath`` reports to.

    Raises SettingsError for arguments that would choose samples as well, ControlError for data without numbers.
    """

    def __init__(self, trainer: SCUTrainer, settings: CurriculumSettings) -> None:
        _refuse(trainer, settings)
        self.trainer, self.settings = trainer, settings
        self.sampler: Optional[CurriculumSampler] = None
        self.counts = Counts()
        self.on_row = lambda row: None
        self._local = Counts()
        self._real_tokens: Optional[torch.Tensor] = None
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._weights: Optional[torch.Tensor] = None
        self._bad_in_a_row = 0
        self._first_step = 0  # of this epoch's plan
        self._steps = 0
        self._progress_before = 0.0  # epochs done before this plan's first step
        self._total_steps = 0
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
        self.sampler.set_epochs(self._epochs())
        self._require_enough_epochs()
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

    def _require_enough_epochs(self) -> None:
        if "infobatch" in self.settings.methods and self.sampler.epochs < FEWEST_EPOCHS_TO_PRUNE:
            raise SettingsError(
                f"curriculum infobatch over {self.sampler.epochs:.3g} epochs: its first epoch learns what is easy and "
                f"its last ones see all rows, so it needs {FEWEST_EPOCHS_TO_PRUNE} or more; raise num_train_epochs or "
                "use another curriculum"
            )

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
        return map(self._delivered, loader)

    def _delivered(self, inputs: Any) -> Any:
        batch = layout_for(self.trainer.model, inputs)
        local, mask = self._local, inputs.get("attention_mask")
        local.rows += len(inputs["sample_index"])
        limit = self._limit(batch.width)
        if limit is not None:
            inputs = self._cut(inputs, batch, limit)
            mask = inputs.get("attention_mask")
        padded = len(inputs["sample_index"]) * max(1, min(batch.width, limit or batch.width) + batch.decoder_width)
        local.padded_tokens += padded
        if torch.is_tensor(mask) and mask.dim() == 2:
            real = mask.sum()  # stays on the device: read at the end of the epoch
            self._real_tokens = real if self._real_tokens is None else self._real_tokens + real
        else:
            local.real_tokens += padded
        return inputs

    def _limit(self, width: int) -> Optional[int]:
        """Tokens per row while the length warms up; None where nothing is to be cut."""
        if "length_warmup" not in self.settings.methods:
            return None
        law, longest = self.sampler.law, int(self.sampler.lengths.max())
        wanted = self.settings.length_warmup_steps
        law = replace(law, warmup_share=min(1.0, wanted if wanted < 1 else wanted / self._total_steps))
        limit = control.warmup_limit(law, self.trainer.state.global_step, self._total_steps, longest)
        return None if limit is None or limit >= width else limit

    def _cut(self, inputs: Any, batch: Any, limit: int) -> Any:
        cut = {
            name: value[:, :limit].contiguous() if follows_time(name, value, batch) else value
            for name, value in inputs.items()
        }
        labels = cut.get("labels")
        if not batch.trimmable or batch.is_encoder_decoder or not bool((labels[:, 1:] != PADDING["labels"]).any()):
            return inputs  # cut there, nothing would be left to learn
        self._local.cut_tokens += int(sum(max(0, length - limit) for length in batch.needed))
        return type(inputs)(cut)

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
            self.sampler.law = replace(self.sampler.law, chance_loss=math.log(reading.classes))

    def weights_of(self, ids: torch.Tensor) -> Optional[torch.Tensor]:
        return None if self._weights is None else self._weights[ids]

    def record(self, ids: torch.Tensor, sums: torch.Tensor, counts: torch.Tensor) -> None:
        self._bad_in_a_row = 0
        self._pending.append((self.trainer.state.global_step, ids, sums, counts))

    def quarantine(self, ids: torch.Tensor) -> None:
        """Rows without a finite loss: out of this step and out of every later epoch."""
        step = self.trainer.state.global_step
        self._bad_in_a_row += len(ids)
        self._pending.append((step, ids, torch.full(ids.shape, math.nan), torch.ones(ids.shape)))
        logger.warning(
            "step %d: the loss of sample %s is not a finite number; set aside, not trained on again",
            step + 1,
            ", ".join(map(str, ids.tolist())),
        )
        if self._bad_in_a_row >= MOST_BAD_ROWS:
            raise NonFiniteLoss(
                f"step {step + 1}: {self._bad_in_a_row} rows in a row gave no finite loss: it is the model and not its "
                "data. Lower learning_rate, use bf16 instead of fp16, or resume from the newest checkpoint"
            )

    def _local_losses(self) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """(optimizer step, sample, mean loss) of all rows seen since the last call, shape (k,) each.

        A row counts once per step: what ran again after an out-of-memory is there several times.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return numpy.zeros(0, numpy.int64), numpy.zeros(0, numpy.int64), numpy.zeros(0)
        steps = numpy.repeat([entry[0] for entry in pending], [len(entry[1]) for entry in pending])
        ids = torch.cat([entry[1] for entry in pending]).cpu().numpy()
        device = pending[0][1].device
        sums, counts = (torch.cat([entry[i].to(device).double() for entry in pending]).cpu().numpy() for i in (2, 3))
        key = steps * len(self.sampler.lengths) + ids
        _, last = numpy.unique(key[::-1], return_index=True)
        keep = numpy.sort(len(key) - 1 - last)
        keep = keep[counts[keep] > 0]  # a row cut to nothing that is learned has no loss
        return steps[keep], ids[keep], sums[keep] / counts[keep]

    def gather(self) -> None:
        """Put the losses and counts of all ranks together; every rank calls it at the same place."""
        if self._real_tokens is not None:
            self._local.real_tokens += int(self._real_tokens)
            self._real_tokens = None
        parts = self._from_all([(*self._local_losses(), self._local)])
        self._local = Counts()
        self.counts = sum((part[3] for part in parts), self.counts)
        steps, ids, losses = (numpy.concatenate([part[i] for part in parts]) for i in range(3))
        order = numpy.argsort(steps, kind="stable")
        self.sampler.update(ids[order], losses[order], self.sampler.current.epoch)

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
        self.counts = Counts()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Every rank calls it; one writes."""
        self.gather()
        if not self.trainer.args.should_save:
            return
        state, arrays = self.sampler.state_dict()
        done = self.trainer.state.global_step - self._first_step
        progress = self._progress_before + (self.sampler.current.epoch + 1 - self._progress_before) * done / self._steps
        state |= {
            "steps_done": done,
            "steps": self._steps,
            "accumulation": self._accumulation,
            "progress": progress,
            "progress_before": self._progress_before,
            "counts": asdict(self.counts),
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
        is_leader = self.trainer.is_world_process_zero()
        self.counts = Counts(**state["counts"]) if is_leader else Counts()
        if state["steps_done"] >= state["steps"]:
            self.counts = Counts()
            return state["epoch"] + 1, 0
        if notices:
            self._resumed = (state["epoch"], state["progress"])
            return state["epoch"], 0
        self._resumed = (state["epoch"], state["progress_before"])
        if not same_steps:
            logger.warning("gradient_accumulation_steps changed: the rest of the epoch takes other steps")
            self._resumed = (state["epoch"], state["progress"])
        return state["epoch"], done // self.sampler.world


def _refuse(trainer: SCUTrainer, settings: CurriculumSettings) -> None:
    args, rows = trainer.args, trainer.train_dataset
    if rows is not None and (isinstance(rows, torch.utils.data.IterableDataset) or not has_length(rows)):
        raise ControlError(
            f"a curriculum chooses samples by number, and a {type(rows).__name__} is a stream; set streaming: false "
            "or leave the curriculum out"
        )
    refused = {
        "train_sampling_strategy": (args.train_sampling_strategy, "random", "it would choose the samples as well"),
        "dataloader_drop_last": (args.dataloader_drop_last, False, "it would drop rows that nobody counts"),
        "auto_find_batch_size": (args.auto_find_batch_size, False, "it begins epochs anew; memory_control does not"),
        "ignore_data_skip": (args.ignore_data_skip, False, "a resumed epoch would show rows twice"),
    }
    for name, (found, needed, reason) in refused.items():
        if found != needed:
            raise SettingsError(f"{name}: {found} with a curriculum: {reason}; set {name}: {str(needed).lower()}")
    if args.n_gpu > 1:
        raise ControlError("a curriculum does not work under DataParallel; start one process per GPU with torchrun")
    if trainer.chunked is not None and trainer.chunked.settings.batch_mode == "logical":
        raise SettingsError("batch_mode: logical moves rows between steps, a curriculum plans them; use chunk")
