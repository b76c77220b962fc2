"""Settings of the stock Trainer that do what they say, and something else that costs a run."""

from __future__ import annotations

from collections.abc import Iterator

from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding

FINDS_BATCH_SIZE = Check(
    "restarts-on-out-of-memory",
    "warning",
    "auto_find_batch_size starts the steps over after an out-of-memory, with the weights trained so far: samples are "
    "repeated or never seen",
    "drop it: memory_control recovers without",
)
GROUPS_BY_LENGTH = Check(
    "batches-grouped-by-length",
    "warning",
    "train_sampling_strategy: group_by_length makes the loss a sawtooth and gives short rows too much weight",
    "use curriculum: token_budget, which saves the same padding",
)
NO_SHUFFLE = Check(
    "rows-not-shuffled",
    "warning",
    "train_sampling_strategy: sequential shows samples in the order of the file, class after class if it is sorted",
    "use train_sampling_strategy: random",
)


def before_loading(job: Job) -> Iterator[Finding]:
    training = job.training
    if training.auto_find_batch_size:
        yield FINDS_BATCH_SIZE.found("auto_find_batch_size: true", "auto_find_batch_size")
    if training.train_sampling_strategy == "group_by_length":
        yield GROUPS_BY_LENGTH.found("train_sampling_strategy: group_by_length", "train_sampling_strategy")
    if training.train_sampling_strategy == "sequential" and job.task.task != TEXT:
        yield NO_SHUFFLE.found("train_sampling_strategy: sequential", "train_sampling_strategy")
