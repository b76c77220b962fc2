"""Choose which files of a run go to the Hub, and list every file that does not with the reason.

Published are the weights, the tokenizer or processor, the card, and small files of results. Absolute paths of this
machine are removed from JSON files. A file that seems to hold a secret stops the push.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

from scu_trainer.errors import HubError, ModelError
from scu_trainer.hub.card import CARD, card_of, is_replaceable_card
from scu_trainer.hub.facts import MERGE_FILE, RunFacts
from scu_trainer.hub.local_paths import without_local_paths
from scu_trainer.models.published import ADAPTER, PROCESSOR, WEIGHTS, model_files, names_like
from scu_trainer.run_files import read_json
from scu_trainer.secrets import redact

RESULTS = (
    *("training_config.json", "scu_config.json", "scu_metrics.json", "scu_history.json"),
    *("log_history.json", "memory_history.json", "curriculum.json", MERGE_FILE),
)
TEXTS = (".json", ".md", ".jinja", ".py")
VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")
"""JSON files with parts of words, which are no paths or secrets even if they look like one."""

STAY = {
    "checkpoint-*": "checkpoints",
    "logs": "logs",
    "run.json": "state of the process",
    "_*": "locks",
    "training_args.bin": "a pickle",
    "trainer_state.json": "state of the trainer",
    "ema.safetensors": "moving averages; the weights themselves are sent",
    "samples.json": "held-out texts; the card shows the last answers",
    "*.bin": "pickles",
    "*.pt": "pickles",
}
"""Reasons why files are not published, by pattern; other files have no specific reason."""


@dataclass(frozen=True)
class Item:
    """One file to upload; ``source`` is a local file, or the content itself."""

    path_in_repo: str
    source: Union[Path, bytes]

    @property
    def size_bytes(self) -> int:
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size


@dataclass(frozen=True)
class Upload:
    """The ``items`` to publish, (name, reason) of what is ``left_out``, and whether the user ``edited`` the card."""

    items: list[Item]
    left_out: list[tuple[str, str]]
    edited: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)


def collect_upload(
    facts: RunFacts, repo_id: str, license: Optional[str], base_id: Optional[str], merged: Optional[Path] = None
) -> Upload:
    """Collect the files of a run to publish; ``merged`` is the folder of merged weights, to replace its adapter. Raises
    HubError for secrets and for a base that is not shared; ModelError if weights are missing or damaged."""
    weights = merged or facts.weights
    names = names_like(weights, (ADAPTER if facts.is_adapter else model_files(weights)) + PROCESSOR)
    if not any(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{weights} holds no weights in safetensors files; train it again, or convert them first")
    for name in names:
        if name.endswith(".safetensors"):
            _refuse_damaged(weights / name)
    _refuse_missing_parts(weights, names)
    if facts.is_adapter:
        require_shared_base(facts, base_id)
    sources = {name: weights / name for name in names}
    results = facts.run if facts.step is None else None
    sources |= {name: folder / name for folder in (results, merged) if folder for name in names_like(folder, RESULTS)}
    if merged is None:
        sources.pop(MERGE_FILE, None)  # a file of another program with this name
    items = [Item(name, _published(name, path, base_id)) for name, path in sources.items()]
    card, edited = _card(facts, weights / CARD, repo_id, license, base_id)
    items.append(Item(CARD, card))
    for item in items:
        _refuse_secrets(item)
    reasons = {**STAY, **(dict.fromkeys(ADAPTER, "merged into the weights") if merged is not None else {})}
    names = sorted(path.name for path in facts.weights.iterdir())
    left_out = [(name, _reason(name, reasons)) for name in names if name not in {*sources, CARD}]
    if merged is not None and not is_replaceable_card(facts.weights / CARD):
        left_out.append((CARD, f"the edited card of the adapter; that of the merged weights is {merged / CARD}"))
    return Upload(sorted(items, key=lambda item: item.path_in_repo), left_out, edited)


def _refuse_damaged(weights: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ModelError(
            f"{weights} is damaged or cut off ({error}), so nobody could load it; copy it again, or push a checkpoint"
        ) from None


def _refuse_missing_parts(weights: Path, names: Iterable[str]) -> None:
    """Raise ModelError if an index names missing files; next to a whole weight file, the index is a leftover."""
    for index in (name for name in names if name.endswith(".safetensors.index.json")):
        parts = read_json(weights / index).get("weight_map")
        named = parts.values() if isinstance(parts, dict) else ["weight_map"]
        missing = next((str(part) for part in named if not (weights / str(part)).is_file()), None)
        if missing is not None and not (weights / index.removesuffix(".index.json")).is_file():
            raise ModelError(
                f"{weights / missing}, which {index} names, is missing, so nobody could load these weights; copy it "
                "again, or push a checkpoint"
            )


def superseded_files(there: Iterable[str], upload: Upload) -> list[str]:
    """Return which files on the Hub (``there``), left by an earlier push, would be loaded instead of ``upload``: the
    base that an ``adapter_config.json`` names, or ``model.safetensors`` before an index, even next to newer weights."""
    sent = {item.path_in_repo for item in upload.items}
    patterns = (*ADAPTER, *RESULTS) if "adapter_config.json" in sent else (*ADAPTER, *WEIGHTS, *RESULTS)
    return sorted(name for name in {*there} - sent if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def require_shared_base(facts: RunFacts, base_id: Optional[str]) -> None:
    """Raise HubError for an adapter that nobody else could load, because its base is not on the Hub."""
    if base_id or facts.base_id:
        return
    base = "the embedded base, which each machine makes for itself" if facts.is_embedded_base else facts.base
    raise HubError(
        f"the base of this adapter is {base}: people who download the adapter do not have it. Add --merged to push the "
        "full weights, or --base_model OWNER/NAME if the same base is on the Hub"
    )


def _published(name: str, path: Path, base_id: Optional[str]) -> Union[Path, bytes]:
    """Return the path of a file, or its content if that is changed for publication (local paths, id of the base)."""
    if not name.endswith(".json") or name in VOCABULARIES or name.endswith(".index.json"):
        return path
    content = read_json(path)
    clean = without_local_paths(content)
    if name == "adapter_config.json" and base_id:
        clean["base_model_name_or_path"] = base_id
    return path if clean == content else (json.dumps(clean, indent=2) + "\n").encode()


def _card(
    facts: RunFacts, own: Path, repo_id: str, license: Optional[str], base_id: Optional[str]
) -> tuple[bytes, bool]:
    """Return the content of the card, and whether it is the user's ``own`` file."""
    if not is_replaceable_card(own):
        return own.read_bytes(), True
    return card_of(facts, repo_id, license, base_id).encode(), False


def _refuse_secrets(item: Item) -> None:
    if not item.path_in_repo.endswith(TEXTS) or item.path_in_repo in VOCABULARIES:
        return
    content = item.source if isinstance(item.source, bytes) else item.source.read_bytes()
    text = content.decode(errors="replace")
    if redact(text) != text:
        raise HubError(f"{item.path_in_repo} holds what looks like a token or password; take it out first")


def _reason(name: str, reasons: dict[str, str]) -> str:
    return next((why for pattern, why in reasons.items() if fnmatch.fnmatchcase(name, pattern)), "not needed to use it")
