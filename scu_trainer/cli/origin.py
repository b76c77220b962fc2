"""Which run weights were made from that merge, export or prune wrote: they are scored as that run is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.subjects import BASE, Subject, description_of, split_seed, subject_of
from scu_trainer.errors import ModelError, UserError
from scu_trainer.hub.facts import made_by_us, run_of
from scu_trainer.models.loading.names import base_of, check_source, found_base, is_adapter
from scu_trainer.settings.tasks import TEXT


def adapter_hash(source: Path) -> str:
    """SHA-256 of the weights of an adapter: merged weights belong to these and no others."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(source.glob("adapter_model*")))).hexdigest()


def is_merged_from(folder: Path, adapter: Path) -> bool:
    """Whether ``folder`` was merged from these weights; what is out of the tolerance is not written."""
    return made_by_us(folder).get("adapter_sha256") == adapter_hash(adapter)


def run_behind(weights: Path) -> Optional[dict[str, Any]]:
    """The run that ``weights`` are of, or were made from, as the file beside them holds it under "run": its folder, and
    a SHA-256 of what says which documents it held out. None where they are of no run."""
    made = made_by_us(weights)
    if "run" in made:
        return made["run"]
    source = Path(made.get("adapter") or made.get("source") or weights)
    if made and not is_merged_from(weights, source):  # written before runs were noted
        return {"folder": str(source), "sha256": None}
    run = run_of(source)
    return None if run is None else {"folder": str(run), "sha256": _hash_of(run)}


def _hash_of(run: Path) -> Optional[str]:
    """Of the data of ``run`` and how they are split; a resume changes the rest of its description."""
    try:
        found = description_of(run)
    except UserError:  # gone, or of another program
        return None
    split = [found["data"].get("fingerprint"), split_seed(found), found["seed"]]
    return hashlib.sha256(json.dumps(split).encode()).hexdigest()


def of_its_run(subject: Subject) -> Subject:
    """With the run that its weights were made from, where that is still there and the same."""
    behind = _behind(subject)
    if behind is None or _is_lost(behind):
        return subject
    run = behind["folder"]
    there = replace(subject, model=replace(subject.model, model_name_or_path=run), run=description_of(Path(run)))
    data = {name: getattr(there.data, name) for name in ("dataset", "eval_dataset")}  # paths that were found from there
    return replace(subject, run={**there.run, "configuration": {**there.run["configuration"], **data}})


def _behind(subject: Subject) -> Optional[dict[str, Any]]:
    """As ``run_behind``, of what is not known to be of a run."""
    return None if subject.run or subject.word else run_behind(Path(subject.source))


def _is_lost(behind: dict[str, Any]) -> bool:
    """Whether the run that ``run_behind`` gave is gone, or is another one by now."""
    return behind["sha256"] is None or behind["sha256"] != _hash_of(Path(behind["folder"]))


def lost_run(subject: Subject) -> Optional[str]:
    """What to say where nobody knows what ``subject`` has learned, for want of the run that it was made from."""
    behind = _behind(subject)
    if behind is None or not _is_lost(behind):
        return None
    return f"{subject.name} was made from {behind['folder']}, and the run is no longer found there"


def base_subject(subject: Subject, flag: str = "--against") -> Subject:
    """What ``subject`` was tuned from, or what it was made from was. Raises ModelError if that is unknown or gone;
    ``flag`` would name another."""
    made = made_by_us(Path(subject.source))
    if is_adapter(Path(subject.source)):
        name = base_of(Path(subject.source))
    elif subject.run:
        name = subject.run["configuration"].get("model_name_or_path")
        if name is None and subject.task != TEXT:
            raise ModelError(f"{subject.name} was trained from scratch, so it has no base; drop base from --against")
        name = found_base(name, Path(subject.source)) if name else _embedded_base(subject)
    elif made:
        source, lost = made.get("adapter") or made["source"], None
        if "adapter" in made and not is_merged_from(Path(subject.source), Path(source)):
            lost = f"merged from an adapter that is no longer in {source}"
        elif Path(source).is_absolute() and not Path(source).exists():  # else a Hub id
            lost = f"made from {source}, which is gone"
        if lost is not None:
            raise ModelError(
                f"{subject.name} was {lost}, so its base is unknown; give it as a path or Hub id: {flag} PATH_OR_ID"
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
