"""Finds the run that merge, export or prune made weights from, so that they are scored as that run is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.subjects import BASE, Subject, description_of, split_seed, subject_of
from scu_trainer.errors import ModelError, UserError
from scu_trainer.hub.facts import read_made_file, run_directory_of
from scu_trainer.models.loading.names import base_of, check_source, find_base_folder, is_adapter
from scu_trainer.settings.tasks import TEXT


def adapter_hash(source: Path) -> str:
    """Return the SHA-256 of the weights of an adapter, by which merged weights are matched with their adapter."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(source.glob("adapter_model*")))).hexdigest()


def is_merged_from(folder: Path, adapter: Path) -> bool:
    """Whether ``folder`` was merged from the present weights of ``adapter``. If so, it is within the tolerance, because
    nothing else is written."""
    return read_made_file(folder).get("adapter_sha256") == adapter_hash(adapter)


def source_run_of(weights: Path) -> Optional[dict[str, Any]]:
    """Return the run that ``weights`` belong to or were made from, as the file next to them stores it under "run": its
    folder, and a SHA-256 of the values that decide which documents it held out. None if there is no such run."""
    made = read_made_file(weights)
    if "run" in made:
        return made["run"]
    source = Path(made.get("adapter") or made.get("source") or weights)
    if made and not is_merged_from(weights, source):  # a version that did not store the run wrote them
        return {"folder": str(source), "sha256": None}
    run = run_directory_of(source)
    return None if run is None else {"folder": str(run), "sha256": _split_hash(run)}


def _split_hash(run: Path) -> Optional[str]:
    """Return the hash of the data of ``run`` and their split, which a resume does not change; None if it is gone."""
    try:
        description = description_of(run)
    except UserError:  # gone, or of another program
        return None
    split = [description["data"].get("fingerprint"), split_seed(description), description["seed"]]
    return hashlib.sha256(json.dumps(split).encode()).hexdigest()


def with_source_run(subject: Subject) -> Subject:
    """Return ``subject`` with the run that its weights were made from, if that run is still there and unchanged."""
    recorded = _recorded_run(subject)
    if recorded is None or _is_lost(recorded):
        return subject
    run = recorded["folder"]
    source_run = replace(subject, model=replace(subject.model, model_name_or_path=run), run=description_of(Path(run)))
    data = {name: getattr(source_run.data, name) for name in ("dataset", "eval_dataset")}  # paths found from its folder
    return replace(subject, run={**source_run.run, "configuration": {**source_run.run["configuration"], **data}})


def _recorded_run(subject: Subject) -> Optional[dict[str, Any]]:
    """Return what ``source_run_of`` finds for a subject that has no run yet; None for others."""
    return None if subject.run or subject.word else source_run_of(Path(subject.source))


def _is_lost(recorded: dict[str, Any]) -> bool:
    """Whether the run that ``source_run_of`` returned is gone, or its folder holds another run now."""
    return recorded["sha256"] is None or recorded["sha256"] != _split_hash(Path(recorded["folder"]))


def lost_run_message(subject: Subject) -> Optional[str]:
    """Return a message if it is unknown what ``subject`` has learned, because the run that it was made from is gone."""
    recorded = _recorded_run(subject)
    if recorded is None or not _is_lost(recorded):
        return None
    return f"{subject.name} was made from {recorded['folder']}, and the run is no longer found there"


def base_subject(subject: Subject, flag: str = "--against") -> Subject:
    """Return the model that ``subject``, or the model that it was made from, was tuned from. Raises ModelError if that
    is unknown or gone; the message proposes ``flag`` to name another one."""
    made = read_made_file(Path(subject.source))
    if is_adapter(Path(subject.source)):
        name = base_of(Path(subject.source))
    elif subject.run:
        name = subject.run["configuration"].get("model_name_or_path")
        if name is None and subject.task != TEXT:
            raise ModelError(f"{subject.name} was trained from scratch, so it has no base; drop base from --against")
        name = find_base_folder(name, Path(subject.source)) if name else _embedded_base(subject)
    elif made:
        source, problem = made.get("adapter") or made["source"], None
        if "adapter" in made and not is_merged_from(Path(subject.source), Path(source)):
            problem = f"merged from an adapter that is no longer in {source}"
        elif Path(source).is_absolute() and not Path(source).exists():  # else a Hub id
            problem = f"made from {source}, which is gone"
        if problem is not None:
            raise ModelError(
                f"{subject.name} was {problem}, so its base is unknown; give it as a path or Hub id: {flag} PATH_OR_ID"
            )
        return base_subject(subject_of(source), flag)
    else:
        raise ModelError(
            f"{subject.name} is neither an adapter nor part of a run, so its base is unknown; give it as a path or "
            f"Hub id: {flag} PATH_OR_ID"
        )
    check_source(name)
    return Subject(name, replace(subject.model, model_name_or_path=name), word=BASE)


def _embedded_base(subject: Subject) -> str:
    from scu_trainer.data import default_cache_dir
    from scu_trainer.train.fixtures.base_model import embedded_base, is_cached

    cache_dir, steps = default_cache_dir(subject.data.cache_dir), subject.model.embedded_base_steps
    if not is_cached(cache_dir, steps):
        raise ModelError(f"the embedded base of {subject.name} is no longer in {cache_dir}; give the path of a copy")
    return str(embedded_base(cache_dir, steps))
