"""Writes the model card at the end of a training run, and does the push that ``push_to_hub`` asks for."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from scu_trainer.errors import HubError
from scu_trainer.hub.card import CARD, base_license, write_card
from scu_trainer.hub.facts import facts_of
from scu_trainer.hub.files import collect_upload
from scu_trainer.hub.local_paths import is_local
from scu_trainer.hub.push import push, require_push_access, require_revision, sent_notes, token_for
from scu_trainer.models.loading.hub_errors import without_retry_advice
from scu_trainer.models.loading.names import base_of, expanded_name
from scu_trainer.runs.studies.comparison_state import is_finished
from scu_trainer.safe_paths import safe_argument
from scu_trainer.settings.tasks import TEXT

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from scu_trainer.train.job.job import Job


def refuse_useless_push(job: Job) -> None:
    """Raise HubError, before anything is loaded, if ``push_to_hub`` would send an adapter that nobody can load."""
    if not job.training.push_to_hub or job.model.tuning == "full":
        return
    name = job.model.model_name_or_path or job.model.adapter_name_or_path
    base = None if name is None else base_of(Path(expanded_name(name)))
    if job.task.task == TEXT and base is not None and not is_local(base):
        return
    shown_base = "the embedded base, which each machine makes for itself" if base is None else base
    raise HubError(
        f"push_to_hub would send an adapter of {shown_base}, but people who download it do not have that base. Drop "
        f"push_to_hub, "
        "and after training push the full weights: scu-trainer push RUN --merged --repo_id OWNER/NAME"
    )


def require_open_hub(training: TrainingArguments) -> None:
    """Raise HubError, before anything is loaded, if the Hub would refuse the pushes of ``push_to_hub``."""
    repo_id = training.hub_model_id or Path(training.output_dir).absolute().name
    try:
        require_revision(training.hub_revision, "hub_revision")
        require_push_access(repo_id, token_for(training.hub_token), bool(training.hub_private_repo))
    except HubError as error:
        raise HubError(f"push_to_hub would fail, so nothing was trained: {error}") from error


def after_training(job: Job) -> None:
    """Write the card of a finished run, and push it if ``push_to_hub``; in the main process only. Raises HubError."""
    from scu_trainer.train.job.job import is_main_process

    run = Path(job.training.output_dir)
    if not is_main_process() or not is_finished(run):
        return
    if not write_card(run):
        print(f"kept: {run / CARD} was edited, and no new card was written")
    if job.training.push_to_hub:
        _push(run, job.training)


def _push(run: Path, training: TrainingArguments) -> None:
    repo_id = training.hub_model_id or run.name
    try:
        facts, _ = facts_of(run)
        upload = collect_upload(facts, repo_id, base_license(facts.base), None)
        sent = push(
            upload,
            repo_id,
            token=token_for(training.hub_token),
            private=bool(training.hub_private_repo),
            revision=training.hub_revision,
            message="End of training",
            base_id=facts.base_id if facts.is_adapter else None,
        )
    except HubError as error:
        retry = f"scu-trainer push {shlex.quote(safe_argument(run))}{_push_flags(repo_id, training)}"
        reason = without_retry_advice(str(error))
        raise HubError(f"trained and saved in {run}, but not pushed: {reason}. When that is fixed: {retry}") from error
    print("\n".join([f"pushed: {sent['url']}", *sent_notes(sent)]))


def _push_flags(repo_id: str, training: TrainingArguments) -> str:
    """Return flags of push that repeat this one: a repository that should be private must not become public."""
    owned = repo_id if "/" in repo_id else f"OWNER/{repo_id}"
    revision = f" --revision {shlex.quote(training.hub_revision)}" if training.hub_revision else ""
    return f" --repo_id {shlex.quote(owned)}{revision}{' --private' if training.hub_private_repo else ''}"
