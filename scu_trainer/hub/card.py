"""The model card of a run, README.md next to its weights. It states only what the files of the run say.

``card_of`` renders it, and ``write_card`` writes it to a run directory, unless there is a card that was edited.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.errors import StorageError
from scu_trainer.hub import card_text
from scu_trainer.hub.facts import IMAGES, RunFacts, read_facts
from scu_trainer.hub.local_paths import is_local
from scu_trainer.run_files import write_text
from scu_trainer.secrets import redact
from scu_trainer.settings.mixture import dataset_names
from scu_trainer.settings.tasks import TEXT

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

CARD = "README.md"
MARK = "<!-- written by scu-trainer {digest}: a card that was edited is kept -->"
_MARK = re.compile(r"<!-- written by scu-trainer (\w+): .* -->\n?")
_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_APPENDED = re.compile(r"\n### Framework versions\n.*", re.DOTALL)
"""The section that peft appends to any existing card when it saves."""


def card_of(facts: RunFacts, name: str, license: Optional[str] = None, base_id: Optional[str] = None) -> str:
    """Return the whole README.md. ``name`` is the Hub id or folder that the code in it loads, ``license`` the one that
    was given or found, and ``base_id`` the id of the base on the Hub, for files that name a local folder. Raises
    StorageError if a file of the run was damaged."""
    try:
        body = redact(card_text.body(facts, name, license or "not stated", base_id or facts.base_id))
        header = _header(facts, name, license, base_id or facts.base_id).to_yaml()
        return f"---\n{redact(header)}\n---\n\n{body}\n\n{MARK.format(digest=_digest(body))}\n"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(
            f"training_config.json, scu_metrics.json or samples.json in {facts.run or facts.weights}, or a merge.json "
            f"made from it, holds what no run writes ({type(error).__name__}: {error}); restore it from a copy"
        ) from error


def write_card(run: Path) -> bool:
    """Write the README.md of a finished run; False if an edited one is kept. Raises StorageError."""
    path = run / CARD
    if not is_replaceable_card(path):
        return False
    facts = read_facts(run, run)
    write_text(path, card_of(facts, str(run), base_license(facts.base)))
    return True


def is_replaceable_card(path: Path) -> bool:
    """Return whether a card may be replaced: it is unchanged since we wrote it, an empty template, or missing."""
    if not path.is_file():
        return True
    body = _APPENDED.sub("", _HEADER.sub("", path.read_text(errors="replace")))
    mark = _MARK.search(body)
    if mark is None:
        return _is_empty_template(body)
    return mark[1] == _digest(_MARK.sub("", body))


def _digest(body: str) -> str:
    return hashlib.sha256(body.strip().encode()).hexdigest()[:16]


def _is_empty_template(body: str) -> bool:
    """Return whether ``body`` is the unfilled template of huggingface_hub, which peft saves with every adapter."""
    from huggingface_hub import ModelCard, ModelCardData

    return body.split() == ModelCard.from_template(ModelCardData()).text.split()


# -- the header that the Hub reads -------------------------------------------------------------------------------------


def _header(facts: RunFacts, name: str, license: Optional[str], base_id: Optional[str]) -> ModelCardData:
    from huggingface_hub import ModelCardData

    results = [] if facts.merge else _results(facts)  # the results of a merged model were measured on its adapter
    fields: dict[str, Any] = {
        "base_model": base_id,
        "base_model_relation": None if base_id is None else ("adapter" if facts.is_adapter else "finetune"),
        "library_name": "peft" if facts.is_adapter else "transformers",
        "pipeline_tag": facts.task if facts.task in (TEXT, IMAGES) else None,
        "license": license,
        "tags": _tags(facts),
        "datasets": _datasets(facts),
    }
    if results:
        fields |= {"model_name": name.rpartition("/")[2], "eval_results": results}
    return ModelCardData(**{key: value for key, value in fields.items() if value is not None})


def _tags(facts: RunFacts) -> list[str]:
    tuning = facts.settings.get("tuning")
    return ["scu-trainer", *([tuning] if tuning in ("lora", "qlora") else []), *(["merged"] if facts.merge else [])]


def _datasets(facts: RunFacts) -> Optional[list[str]]:
    """Return the dataset ids on the Hub; embedded datasets and local files cannot be linked."""
    names = dataset_names(facts.settings.get("dataset"))
    return [name for name in names if "/" in name and not is_local(name, facts.weights)] or None


def _results(facts: RunFacts) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    found = []
    for key, kind, what in (
        ("held_out_bpt_after", "bits_per_token", f"bits per {facts.metrics.get('unit', 'token')}, held out"),
        ("held_out_accuracy_after", "accuracy", "accuracy, held out"),
    ):
        measured = facts.metrics.get(key)
        if measured and measured["value"] is not None:
            found.append(
                EvalResult(
                    task_type=facts.task,
                    dataset_type=card_text.held_out_name(facts),
                    dataset_name=card_text.held_out_name(facts),
                    dataset_split=None if facts.settings.get("eval_dataset") else "held out by the run",
                    metric_type=kind,
                    metric_name=what,
                    metric_value=round(measured["value"], 4),
                )
            )
    return found


# -- licence -----------------------------------------------------------------------------------------------------------


def base_license(base: Optional[str]) -> Optional[str]:
    """Return the license in the card of ``base``, a folder or a Hub id that is in the cache; never uses the network.
    None if the card is missing, cannot be read, or states no license."""
    from huggingface_hub import ModelCard, try_to_load_from_cache
    from yaml import YAMLError

    if not base:
        return None
    local = Path(base).expanduser() / CARD
    found = local if local.is_file() else None if is_local(base) else try_to_load_from_cache(base, CARD)
    if not isinstance(found, (str, Path)):
        return None
    try:
        license = ModelCard.load(found, ignore_metadata_errors=True).data.license
    except (YAMLError, ValueError):  # a broken card of the base must not keep a finished run from getting its card
        return None
    return ", ".join(map(str, license)) if isinstance(license, list) else license
