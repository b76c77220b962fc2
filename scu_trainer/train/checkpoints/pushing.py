"""Uploads checkpoints to the Hub in the background during training (``push_to_hub``, ``hub_strategy``).

A complete checkpoint is sent as one commit, and hard links keep its files until it has arrived, because the run may
rotate it away meanwhile. A failed push does not affect the run and is reported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Optional

from huggingface_hub import CommitOperationAdd, HfApi
from transformers import Trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress

from scu_trainer.errors import StorageError
from scu_trainer.models.loading.hub_errors import hub_line, set_connection_timeout, without_retry_advice
from scu_trainer.models.published import ADAPTER, PROCESSOR, model_files, names_like
from scu_trainer.safe_paths import remove_inside

logger = logging.getLogger("scu_trainer")

HELD = "_pushing-"
OURS = re.compile(rf"{HELD}checkpoint-\d+")


class Pushes:
    """The uploads of one trainer. ``notices``: one line per checkpoint that did not reach the Hub."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.notices: list[str] = []
        self._api: Optional[HfApi] = None
        self._has_branch = False

    def begin(self, checkpoint_folder: str) -> None:
        """Do what the stock ``_push_from_checkpoint`` does, for a checkpoint that already has its final name."""
        trainer, checkpoint = self.trainer, Path(checkpoint_folder)
        if not trainer.is_world_process_zero() or trainer.args.hub_strategy == HubStrategy.END:
            return
        is_pushing = trainer.push_in_progress is not None and not trainer.push_in_progress.is_done()
        if is_pushing and not trainer.args.hub_always_push:
            logger.info(
                "%s is not pushed: an earlier push is still running; hub_always_push sends all", checkpoint.name
            )
            return
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        job = self._send(checkpoint)
        if job is None:
            return
        if is_pushing:
            trainer.push_in_progress.jobs.append(job)
        else:
            trainer.push_in_progress = PushInProgress([job])

    def _shared_api(self, run: Path) -> HfApi:
        """Return the API object of all pushes, with one worker, so that a newer checkpoint arrives last."""
        if self._api is None:
            for path in run.glob(f"{HELD}checkpoint-*"):  # left by a killed start
                remove_inside(run, path.name, OURS)
            self._api = HfApi(token=self.trainer.args.hub_token)
        return self._api

    def _send(self, checkpoint: Path) -> Optional[Future]:
        try:
            api = self._shared_api(checkpoint.parent)
            held = _hold(checkpoint)
        except (OSError, StorageError) as error:  # a full disk prevents this push, but not the run
            self._report_failure(checkpoint.name, str(error))
            return None
        job = api.run_as_future(self._commit, held, checkpoint.name)
        job.add_done_callback(lambda done: self._finished(done, held, checkpoint.name))
        return job

    def _commit(self, held: Path, name: str) -> None:
        set_connection_timeout()
        args = self.trainer.args
        if args.hub_revision is not None and not self._has_branch:  # the stock Trainer creates only the repository
            self._api.create_branch(self.trainer.hub_model_id, branch=args.hub_revision, exist_ok=True)
            self._has_branch = True
        self._api.create_commit(
            self.trainer.hub_model_id,
            _operations(held, name, args.hub_strategy),
            commit_message=f"Training in progress, step {name.rpartition('-')[2]}",
            revision=args.hub_revision,
        )

    def _finished(self, job: Future, held: Path, name: str) -> None:
        with contextlib.suppress(StorageError):  # the next push removes what is left
            remove_inside(held.parent, held.name, OURS)
        error = job.exception()
        if error is None:
            logger.info("%s is on the Hub: %s", name, self.trainer.hub_model_id)
        else:
            line = hub_line(error, self.trainer.hub_model_id) or " ".join(str(error).split())[:200]
            self._report_failure(name, without_retry_advice(line))

    def _report_failure(self, name: str, reason: str) -> None:
        self.notices.append(f"{name} was not pushed to the Hub: {reason}")
        logger.warning("%s; the run continues", self.notices[-1])


def _hold(checkpoint: Path) -> Path:
    """Return a folder with hard links to the same files; copies if the file system does not support hard links."""
    held = checkpoint.with_name(f"{HELD}{checkpoint.name}")
    remove_inside(held.parent, held.name, OURS)
    shutil.copytree(checkpoint, held, copy_function=_linked)
    return held


def _linked(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _operations(held: Path, name: str, strategy: HubStrategy) -> list[CommitOperationAdd]:
    """Return the model for the root of the repository and, for some strategies, the whole checkpoint in a folder."""
    found = [
        CommitOperationAdd(file, held / file) for file in names_like(held, (*ADAPTER, *model_files(held), *PROCESSOR))
    ]
    folder = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: name}.get(strategy)
    if folder is None:
        return found
    files = sorted(path for path in held.rglob("*") if path.is_file())
    return [*found, *(CommitOperationAdd(f"{folder}/{path.relative_to(held)}", path) for path in files)]
