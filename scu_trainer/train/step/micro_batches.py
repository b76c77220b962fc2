"""The Trainer's side of micro-batches: the first ``training_step`` of an optimizer step runs its whole window.

The stock loop prefetches the accumulation batches of the window and calls ``training_step`` once for each. The first
call does all of the work, while all rows are at hand and nothing has been reduced over ranks yet: it calls the stock
``training_step`` for each micro-batch. Later calls return losses that are already known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Optional

import torch
from transformers import Trainer

from scu_trainer.errors import ControlError, OutOfMemory
from scu_trainer.figures import count_text
from scu_trainer.settings import MemorySettings
from scu_trainer.train.loss.analysis.analysis import LossAnalysis
from scu_trainer.train.loss.analysis.frozen_weights import LOSS_WRITES, WRITES
from scu_trainer.train.loss.analysis.own_step import CallCounters, has_user_hook, name_of
from scu_trainer.train.loss.analysis.trials import is_batch_norm
from scu_trainer.train.loss.rows.model_loss import changing_objects_of, learns_prompts, wants_few_sizes
from scu_trainer.train.loss.rows.padding_free import NEEDED
from scu_trainer.train.step import attempts as steps
from scu_trainer.train.step.batches.logical_batch import LogicalBatches
from scu_trainer.train.step.batches.media import first_missing
from scu_trainer.train.step.batches.reduction import Reduction
from scu_trainer.train.step.batches.rows import Batch, layout_for, placed
from scu_trainer.train.step.batches.window import AccumulationWindow, MicroBatch
from scu_trainer.train.step.distributed.launchers import ranks_for
from scu_trainer.train.step.distributed.ranks import Ranks
from scu_trainer.train.step.distributed.sharded import is_fsdp, needs_all_ranks, reshard
from scu_trainer.train.step.micro_batch_sizer import MicroBatchSizer, busy_tokens, may_grow
from scu_trainer.train.step.needless import redundant_train_call_skipped
from scu_trainer.train.step.recovery.memory import Gauge, free_memory
from scu_trainer.train.step.recovery.memory_limit import limited_gauge
from scu_trainer.train.step.recovery.optimizer_guard import OptimizerGuard
from scu_trainer.train.step.recovery.optimizer_state import preallocate
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory, retry_unchanged, second_try
from scu_trainer.train.step.recovery.snapshot import ChangingBuffers, replaced

logger = logging.getLogger("scu_trainer")


TEXT_PARTS = ("encoder", "decoder", "text_encoder", "generator", "text_config")
"""Names under which the configuration of a multi-part model holds the configurations of the parts that see text."""


class MicroBatchStep:
    """Runs accumulation windows for one trainer. ``loop``: the memory loop. ``analysis``: how the loss adds up over
    rows."""

    def __init__(self, trainer: Trainer, settings: MemorySettings, gauge: Optional[Gauge] = None) -> None:
        device = trainer.args.device
        if settings.memory_control and gauge is None:
            gauge = limited_gauge(device, settings.memory_limit_gb)
        self.trainer = trainer
        self.settings = settings
        self.loop = MicroBatchSizer(settings, gauge if settings.memory_control else None, device)
        self.ranks: Optional[Ranks] = None
        self._guard: Optional[OptimizerGuard] = None
        self._token_cap = settings.token_cap if isinstance(settings.token_cap, int) else None
        self._logical_rows: Optional[int] = None
        if settings.batch_mode == "logical":
            self._logical_rows = settings.largest_logical_batch(trainer.args.per_device_train_batch_size)
        self.reset()
        self._prefetched: Sequence[Any] = ()
        self._losses: deque[torch.Tensor] = deque()

    # -- life of a run -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Prepare for a training, before it is set up and reads its checkpoint. The model may have been replaced."""
        self.loop.reset()
        if self._logical_rows is not None:
            self.loop.logical = LogicalBatches(self._logical_rows, self.settings.batch_size_lr_rule, self._layout)
        self.analysis = LossAnalysis(self.trainer)
        self._warned: set[str] = set()
        self._not_by_rows: set[str] = set()
        self._obstacles: set[str] = set()
        self._reported_obstacles: Optional[set[str]] = None  # None before the first report

    def start(self) -> None:
        """Called when training begins, with the model wrapped and placed."""
        model, guard = self.trainer.model, self.trainer.nonfinite_guard
        self.ranks, self._is_fsdp = ranks_for(self.trainer), is_fsdp(self.trainer)
        self._model_parameters, self._optimized = (), -1
        self._has_batch_norm = any(map(is_batch_norm, model.modules()))
        self._pad_token_id = _pad_token_id(self.trainer)
        parameters = self._trained_parameters()
        counts = changing_objects_of(self.trainer)
        self._place = steps.AttemptSite(
            self.trainer.args.device,
            ChangingBuffers(model) if guard is None else guard.buffers,  # shared: one walk through the model per step
            parameters,
            self.ranks.drop_gradients,
            counts,
        )
        self._counters = CallCounters([*counts()[0], self.trainer])
        self.loop.gradient_bytes = sum(p.nbytes for p in parameters)
        self._wants_few_sizes = wants_few_sizes(self.trainer)
        self.loop.busy_tokens = busy_tokens(self.trainer.args.device.type, self._wants_few_sizes)
        self.loop.grows = may_grow(self.trainer.args.device, model.parameters())
        self.prefetched(())
        if self.settings.memory_control and self.ranks.recoverable and not self.trainer.is_deepspeed_enabled:
            self._guard_optimizer(model)

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that this window trains."""
        return self._place.parameters

    def _trained_parameters(self) -> list[torch.nn.Parameter]:
        model, optimizer = self.trainer.model, self.trainer.optimizer
        if self._is_fsdp:
            reshard(model)  # an evaluation may have gathered the weights
        optimized = -1 if optimizer is None else sum(len(group["params"]) for group in optimizer.param_groups)
        # Walking through a model takes as long as a small step, so do it only if the optimizer has other parameters.
        if self._is_fsdp or optimized < 0 or optimized != self._optimized:
            self._model_parameters, self._optimized = tuple(model.parameters()), optimized
        return [p for p in self._model_parameters if p.requires_grad]

    def _update_parameters(self) -> None:
        """Follow a change of trained parameters (unfreezing). Raises ControlError with several ranks or DeepSpeed."""
        parameters = self._trained_parameters()
        self.analysis.own_step.find_hooks(parameters)
        known = self._place.parameters
        if len(parameters) == len(known) and all(map(operator.is_, parameters, known)):
            return
        self.loop.gradient_bytes = sum(p.nbytes for p in parameters)
        if self.ranks.world_size > 1 or self.trainer.is_deepspeed_enabled:
            raise ControlError(
                "the set of trained weights changed during training; with several processes or DeepSpeed memory "
                "control cannot follow that, set memory_control: false"
            )
        self._place = dataclasses.replace(self._place, parameters=parameters)
        self.ranks.weights = parameters

    def _guard_optimizer(self, model: torch.nn.Module) -> None:
        optimizer = self.trainer.optimizer
        allocate = functools.partial(preallocate, optimizer)
        retry_unchanged(allocate, is_cured=lambda error: isinstance(error, OutOfMemory))
        self._guard = OptimizerGuard(optimizer, model.named_parameters())
        self._guard.attach()

    @property
    def reduction(self) -> Optional[Reduction]:
        return self.analysis.reduction

    def finish(self) -> None:
        """Called when training ends."""
        self.prefetched(())
        self.loop.forget_window()
        logical = self.loop.logical
        if logical is not None and logical.kept_rows:
            logger.warning("not trained on: %s that the loader delivered", count_text(logical.kept_rows, "row"))
        if self._guard is not None:
            self._guard.detach()
            self._guard = None

    def prefetched(self, batches: Sequence[Any]) -> None:
        """Take ``batches``, the accumulation batches for the next ``loss`` calls."""
        self._prefetched = batches
        self._losses.clear()

    # -- one window ----------------------------------------------------------------------------------------------------

    def next_to_run(self, inputs: Any) -> Sequence[Any]:
        """Return the accumulation batches that ``loss(inputs)`` runs: a whole window for its first batch, then none."""
        if self._losses:
            return ()
        if len(self._prefetched) > self.trainer.args.gradient_accumulation_steps:  # lowered: a step ends within
            self.prefetched(())
        return self._prefetched if self._begins_window(inputs) else (inputs,)

    def _begins_window(self, inputs: Any) -> bool:
        return bool(self._prefetched) and inputs is self._prefetched[0]

    def loss(self, model: torch.nn.Module, inputs: Any, num_items: Any) -> torch.Tensor:
        """Return the loss of one accumulation batch, as the stock ``training_step`` does."""
        if not self._losses:
            to_run = self.next_to_run(inputs)
            is_prefetched = self._begins_window(inputs)
            completes = is_prefetched or self.trainer.accelerator.sync_gradients
            if not is_prefetched and len(self._prefetched) > 1:
                self._warn_once(
                    "training_step does not receive the batches of the loader, so rows are not pooled across them"
                )
            self._losses.extend(self._run(model, to_run, num_items, completes))
        loss = self._losses.popleft()
        if self.trainer.accelerator.sync_gradients:
            self.ranks.finish()
        return loss

    def _run(self, model: torch.nn.Module, raw: Sequence[Any], num_items: Any, completes: bool) -> list[torch.Tensor]:
        """Run the accumulation batches ``raw`` and return their losses. ``completes``: an optimizer step follows."""
        self._update_parameters()
        failure, done = None, []
        with self.ranks.window(completes):
            try:
                window = second_try(functools.partial(self._window, raw, num_items), "reading the rows of a step")
                window, micro_batches = self._checked_window(window, self._begin(window), num_items)
                before = self._counters.counts()
                done = self._run_micro_batches(micro_batches, model, window, num_items)
                if before and len(done) != len(raw):
                    self._counters.warn_about_counts(before, len(done), len(raw), sum(len(one.rows) for one, _ in done))
            except OutOfMemory as error:
                # The other ranks wait inside a forward or the loss, not here.
                if self.ranks.even_micro_batches or self.analysis.own_step.exchange is not None:
                    raise
                failure = error
            self._stop_all_if_one_failed(failure)
            self.loop.end(done, self.ranks.all_reduce_max)
        self._place.buffers.end_window()
        add = functools.partial(_losses_by_batch, done, len(raw), self._place.device)
        return second_try(add, "adding up the losses of a step")

    def _checked_window(
        self, window: AccumulationWindow, micro_batches: list[MicroBatch], num_items: Any
    ) -> tuple[AccumulationWindow, list[MicroBatch]]:
        """Return the window and its micro-batches: whole batches if the loss is not the sum over its micro-batches."""
        if self.ranks.even_micro_batches or self.analysis.holds(window, self.loop.bounded(micro_batches), num_items):
            return window, micro_batches
        window = self._window_of(window.batches)
        return window, self._begin(window)

    def _begin(self, window: AccumulationWindow) -> list[MicroBatch]:
        step = self.trainer.state.global_step + 1
        if self.ranks.even_micro_batches:  # beginning is collective, so no rank may retry it on its own
            return self.loop.begin(window, step, self.ranks.all_reduce_max)
        return second_try(functools.partial(self.loop.begin, window, step), "planning the micro-batches of a step")

    def _run_micro_batches(self, micro_batches, model, window, num_items) -> list[tuple[MicroBatch, torch.Tensor]]:
        modules = self._place.buffers.modules if model is self.trainer.model else ()
        writes = self.reduction is not None and self.reduction.mixes == LOSS_WRITES

        def attempt(micro_batch: MicroBatch, last: bool) -> torch.Tensor:
            share = 1.0 if micro_batch.weight is None else micro_batch.weight
            with self.ranks.micro_batch(last), self._backward_of(share):
                inputs = placed(window.inputs(micro_batch), self._place.device)
                with (
                    self.analysis.own_step.guard_frozen_weights(self._stop_unrepeatable, writes),
                    self._as_planned(micro_batch),
                    self.analysis.watch_step(inputs, num_items, self.parameters),
                    redundant_train_call_skipped(model, modules),
                ):
                    loss = self.trainer.stock_training_step(model, inputs, num_items)
            return loss if share == 1.0 else loss * share

        if self.settings.memory_control and not self.analysis.own_step.is_stock:
            stop = functools.partial(self._stop_unrepeatable, self.analysis.own_step.mixes)
            return self._run_without_retry(micro_batches, attempt, stop)
        if self.settings.memory_control and self.ranks.recoverable:
            return steps.run(micro_batches, attempt, self.loop, self._place, self.trainer.loss_path)
        if self.ranks.even_micro_batches:
            return self._run_without_retry(micro_batches, attempt, functools.partial(self._stop_sharded, micro_batches))
        return steps.run_once(
            [micro_batch for whole in micro_batches for micro_batch in self.loop.fit(whole)], attempt, self.loop
        )

    def _run_without_retry(
        self, micro_batches, attempt, stop: Callable[[str], NoReturn]
    ) -> list[tuple[MicroBatch, torch.Tensor]]:
        """Run micro-batches that cannot run twice. ``stop``: ends the run, given the text of the failed allocation."""
        with CatchOutOfMemory() as caught:
            return steps.run_once(micro_batches, attempt, self.loop)
        free_memory()
        stop(caught.text)

    def _stop_unrepeatable(self, why: str, text: str) -> NoReturn:
        """Raise OutOfMemory, because user code may have changed something that cannot be undone."""
        place = "a callback" if WRITES in why else "compute_loss or a callback"
        instead = "" if self.analysis.own_step.exchange is not None else f", or move what it does into {place}"
        raise OutOfMemory(
            f"step {self.trainer.state.global_step + 1} ran out of memory and is not run again, because {why}. Lower "
            f"per_device_train_batch_size and raise gradient_accumulation_steps{instead}. "
            f"The failed allocation said: {text}"
        )

    def _stop_sharded(self, micro_batches: Sequence[MicroBatch], text: str) -> NoReturn:
        """Raise OutOfMemory under FSDP and ZeRO-3, after writing a checkpoint if that is possible."""
        largest = max(micro_batches, key=lambda micro_batch: micro_batch.tokens)
        trainer, smaller = self.trainer, max(1, len(largest.rows) // 2)
        if self.ranks.world_size == 1:  # otherwise ranks would deadlock: the others are still inside the micro-batch
            trainer._save_checkpoint(trainer.model_wrapped, trainer._trial)
            saved = f"checkpoint-{trainer.state.global_step} was written, resume_from_checkpoint: true resumes from it"
        else:
            saved = "resume_from_checkpoint: true resumes from the newest checkpoint"
        raise OutOfMemory(
            f"step {trainer.state.global_step + 1} ran out of memory with {len(largest.rows)} rows x {largest.length} "
            f"at once, and under FSDP or ZeRO-3 no micro-batch can run again. {saved}; set max_batch_size: {smaller}, "
            f"which cuts the same batch into smaller micro-batches. The failed allocation said: {text}"
        )

    def _stop_all_if_one_failed(self, failure: Optional[OutOfMemory]) -> None:
        """Stop all ranks if one cannot continue, before any of them waits for its gradients; otherwise share how often
        each rank recovered."""
        local_failures, stopped = self.loop.local_failures, self.ranks.rank + 1 if failure is not None else 0
        own = [local_failures if rank == self.ranks.rank else 0 for rank in range(self.ranks.world_size)]
        failed_rank, *everywhere = self.ranks.all_reduce_max([stopped, *own])
        self.loop.statistics.out_of_memory += sum(everywhere) - local_failures
        if failure is not None:
            raise failure
        if failed_rank:
            raise OutOfMemory(
                f"rank {failed_rank - 1} ran out of memory and cannot continue; its message says what to do"
            )

    def _layout(self, inputs: Any) -> Batch:
        batch = layout_for(self.trainer.model, inputs, self._not_by_rows)
        if batch.obstacle is None and (name := first_missing(inputs)) and needs_all_ranks(self.trainer):
            batch = Batch(inputs, obstacle=f"some rows have no {name}, and all ranks must run the same layers")
        if batch.obstacle_name is not None:
            self._not_by_rows.add(batch.obstacle_name)
        if batch.obstacle is not None:
            self._obstacles.add(batch.obstacle_name or batch.obstacle)
        return batch

    def _window(self, raw: Sequence[Any], num_items: Any) -> AccumulationWindow:
        batches = retry_unchanged(lambda: [self._layout(inputs) for inputs in raw])
        is_new_finding = self.analysis.read(batches, num_items, self._pad_token_id, self.ranks)
        if self.analysis.own_step.hooked is not None:
            self._obstacles.add(self.analysis.own_step.hooked)
        has_new_obstacle = self._reported_obstacles != self._obstacles
        if self.analysis.own_step.is_seen and ((is_new_finding and self.reduction is not None) or has_new_obstacle):
            self._warn_about_limits(batches, num_items)
            self._reported_obstacles = set(self._obstacles)
        return self._window_of(batches)

    def _window_of(self, batches: Sequence[Batch]) -> AccumulationWindow:
        window = AccumulationWindow(batches, self.reduction, self._pad_token_id)
        window.is_padding_free = self._uses_padding_free(window)
        if self._wants_few_sizes and window.can_pool and window.is_uneven and not window.is_padding_free:
            window.take_few_sizes(_most_positions(self.trainer.model), self._token_cap)
        window.fewest_rows = 1 if window.can_pool or not self._has_batch_norm else 2
        return window

    def _uses_padding_free(self, window: AccumulationWindow) -> bool:
        path, is_required = self.trainer.loss_path, self.settings.padding_free
        if path is None or self.reduction is None or not (window.is_uneven or is_required):
            return False
        obstacle = self._obstacle_to_padding_free(window)
        if obstacle is None:
            inputs = functools.partial(placed, window.batches[0].inputs, self._place.device)
            return window.is_uneven and path.can_run_padding_free(inputs, window.longest_row)
        if is_required:
            self._warn_once("padding_free: true, but rows of this step keep their padding: %s", obstacle)
        return False

    def _obstacle_to_padding_free(self, window: AccumulationWindow) -> Optional[str]:
        if not window.can_pool:
            return "the loss is not a sum over rows"
        if self.reduction.reads_padding:
            return self.reduction.reads_padding
        if any(set(self.trainer.loss_path.inputs_for_model(batch.inputs)) != NEEDED for batch in window.batches):
            return f"a batch does not hold exactly {', '.join(sorted(NEEDED))}"
        if not all(batch.is_padded_right for batch in window.batches):
            return "rows have padding on the left, or learn their padding"
        return None

    @contextlib.contextmanager
    def _as_planned(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Inside, the loss path follows the plan. If a micro-batch planned without padding came with it, because user
        code reads more of the model's output than its loss, plan with padding from here on."""
        path, padded = self.trainer.loss_path, len(micro_batch.rows) * micro_batch.length
        if path is None or not path.is_padding_free:
            yield
            return
        path.end_to_end, path.is_planned = None, micro_batch.unpadded_tokens is not None
        path.wants_few_sizes, path.token_cap = self._wants_few_sizes, self._token_cap
        yield
        rows = path.end_to_end
        if rows is None or not rows.seen:
            if micro_batch.unpadded_tokens not in (None, padded):
                path.stay_padded("user code read more of the model's output than its loss, so rows kept their padding")
        elif micro_batch.unpadded_tokens is not None or rows.prefixes is not None:
            self.loop.record_processed_tokens(micro_batch, rows.seen[-1])

    # -- the loss ------------------------------------------------------------------------------------------------------

    def _warn_about_limits(self, batches: Sequence[Batch], num_items: Any) -> None:
        obstacle = next((batch.obstacle for batch in batches if batch.obstacle), None)
        if obstacle:
            self._warn_once("batches cannot be cut by rows (%s): each runs whole or fails", obstacle)
        if self.analysis.own_step.exchange is not None:
            return
        if self.reduction is None:
            if any(batch.rows > 1 for batch in batches):
                self._warn_once(
                    "the rows of this step do not show how the loss adds up over them: batches run whole until a "
                    "later step shows it (max_batch_size, token_cap and short memory do not cut them)"
                )
            return
        if not self.reduction.is_exact:
            bound = f"; min_batch_size (now {self.settings.min_batch_size}) bounds how small they may become"
            self._warn_once(
                "a split batch would not give the gradient of the whole batch: %s. Batches run whole%s "
                "(max_batch_size and token_cap do not cut them)%s",
                self.reduction.mixes,
                *((" while memory allows", bound) if self.reduction.may_be_cut else (", however short memory is", "")),
            )
        elif self.reduction.reads_padding:
            self._warn_once(
                "padding is kept, because this model's loss depends on it (%s)", self.reduction.reads_padding
            )
        hooked = next(filter(has_user_hook, self.parameters), None)
        if hooked is not None and self.reduction.is_exact:
            self._warn_once(
                "a hook on %s gets the gradient of each micro-batch, while the stock loop passes it the gradient "
                "of a batch: a hook that is not linear, such as a clamp, changes what is trained; to see the "
                "gradient of the whole step, use on_pre_optimizer_step of a callback",
                name_of(hooked, self.trainer.model),
            )
        if self.means_added(num_items) > 1:
            self._warn_once("%s", self.analysis.added_means_warning(num_items))

    def _warn_once(self, text: str, *values: Any) -> None:
        """Warn, unless the same warning was logged before: later findings about the loss may repeat it."""
        warning = text % values
        if warning not in self._warned:
            self._warned.add(warning)
            logger.warning(warning)

    def means_added(self, num_items: Any) -> int:
        """Return how many mean losses, over the window's batches and all ranks, the stock loop adds up as if they were
        parts of one mean; 1 if there is only one or they are averaged."""
        if self.reduction is None or not self.reduction.is_mean:
            return 1
        return self.analysis.means_added(num_items)

    def _backward_of(self, share: float) -> contextlib.AbstractContextManager[None]:
        """Inside, ``accelerator.backward`` scales its loss by ``share``, the weight of a part in the mean over the
        whole. The code that computes the loss does not notice."""
        accelerator = self.trainer.accelerator
        if share == 1.0:
            return contextlib.nullcontext()
        backward = accelerator.backward
        return replaced(accelerator, "backward", lambda loss, **kwargs: backward(loss * share, **kwargs))


def _pad_token_id(trainer: Trainer) -> int:
    for owner in (trainer.processing_class, getattr(trainer.model, "config", None)):
        token = getattr(owner, "pad_token_id", None)
        if isinstance(token, int) and token >= 0:
            return token
    return 0


def _most_positions(model: torch.nn.Module) -> int:
    """Return the tokens for which every part of the model has positions; 0 if unknown or if prompts take some."""
    if learns_prompts(model):
        return 0
    config = getattr(model, "config", None)
    candidates = (getattr(config, name, None) for name in TEXT_PARTS)
    parts = [part for part in candidates if part is not None] or [config]
    return min(getattr(part, "max_position_embeddings", None) or 0 for part in parts)


def _losses_by_batch(
    done: Sequence[tuple[MicroBatch, torch.Tensor]], count: int, device: torch.device
) -> list[torch.Tensor]:
    """Return the loss of each accumulation batch; a micro-batch with rows of several counts for the first of them."""
    losses: list[Optional[torch.Tensor]] = [None] * count
    for micro_batch, loss in done:
        before = losses[micro_batch.batch]
        losses[micro_batch.batch] = loss if before is None else before + loss
    return [torch.zeros((), device=device) if loss is None else loss for loss in losses]
