"""The condition of a checkpoint, as far as it can be known without loading it.

Three kinds of findings:

    damage      must not be resumed from: no folder, no readable trainer_state.json, a torn manifest, or a file that
                training reads is shorter than written or cannot be opened. Never chosen; refused if named
    changes     readable, but not as written: a file was edited, is gone, or has been replaced. Chosen by default only
                if no checkpoint is complete; if named, resumed from with a warning
    spare       a file that resuming does not need is gone. Chosen, with a warning
"""

from __future__ import annotations

import dataclasses
import lzma
import os
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, Optional, Union

from transformers import TrainerState

from scu_trainer.errors import CheckpointError
from scu_trainer.json_types import first_misfit, misfit
from scu_trainer.models.loading.names import is_safetensors
from scu_trainer.run_files import read_object_or_none
from scu_trainer.train.checkpoints.format import MANIFEST, Difference, differences, step_of
from scu_trainer.train.checkpoints.saved_state import OF_LOOPS, SHAPES, TENSORS, read_state

OPTIMIZER_STATES = ("optimizer.pt", "optimizer.bin", "optimizer_0", "latest")
"""Files of the stock Trainer, of FSDP (whole, in parts), of DeepSpeed."""

WEIGHTS_ONLY_HINT = (
    "--weights_only, in Python safety=SafetySettings(weights_only=True), uses its weights and starts the optimizer over"
)

EPOCH_START = "epoch_start"
"""Folder of a checkpoint with the random states from the start of its epoch.

Samplers that draw from the generators of the process (group_by_length, or without use_seedable_sampler) need them to
repeat the order of the epoch. Without loops there is no such folder: the stock Trainer draws another order.
"""

STATE = "trainer_state.json"
WEIGHTS = re.compile(r"(adapter_|pytorch_)?model[^/]*\.(safetensors|bin)")
ZIPPED = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth")
UNREADABLE_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError, struct.error)
"""What zipfile raises for one changed byte, such as of a flag that says encrypted, of a method or of a name."""
READ = re.compile(
    rf"{WEIGHTS.pattern}|(pytorch_)?model[^/]*\.index\.json|(adapter_)?config\.json|optimizer\..*|scheduler\.pt|scaler\.pt"
    r"|rng_state.*\.pth|trainer_state\.json|latest|.*/.*"
)
"""Files that a resume of the stock Trainer opens, including those of DeepSpeed and FSDP in folders."""

NEEDED_OF_STATE = {
    **dict.fromkeys(("global_step", "num_input_tokens_seen"), int),
    **dict.fromkeys(("epoch", "total_flos", "best_metric"), float),
    **dict.fromkeys(("train_batch_size", "best_global_step"), Optional[int]),
    "best_model_checkpoint": Optional[str],
    "log_history": list,
    "stateful_callbacks": Union[dict, list, None],
}
"""Keys of trainer_state.json that a resumed training needs. The others are computed again."""

FIELDS_OF_STATE = {field.name for field in dataclasses.fields(TrainerState)}


@dataclasses.dataclass(frozen=True)
class Findings:
    """Findings about one checkpoint, in words; see the docstring of the module."""

    damage: Optional[str] = None
    changes: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()

    @property
    def fault(self) -> Optional[str]:
        """Why an older checkpoint should be preferred; None if there is no reason."""
        return self.damage or (self.changes[0] if self.changes else None)


def examine(checkpoint: Path, world_size: Optional[int], weights_only: bool = False, hashes: bool = True) -> Findings:
    """Return all that can be known about ``checkpoint`` without loading it.

    world_size: the ranks that would resume; None: any number. hashes: compare contents, not only sizes. In a checkpoint
    of the stock Trainer (no manifest), rank 0 writes trainer_state.json last, but the other ranks write their random
    states without waiting for it.
    """
    try:
        return _examined(checkpoint, world_size, weights_only, hashes)
    except OSError as error:
        return Findings(f"it cannot be read ({error.strerror or error})")


def _examined(checkpoint: Path, world_size: Optional[int], weights_only: bool, hashes: bool) -> Findings:
    if not checkpoint.is_dir():
        return Findings("it is not a folder")
    found = differences(checkpoint, hashes=hashes)
    state = read_object_or_none(checkpoint / STATE)  # read once: a run that trains may remove the checkpoint meanwhile
    damage = _damage(checkpoint, state, found)
    if state is None or damage is not None:
        return Findings(damage)
    if not has_optimizer(checkpoint) and not weights_only:
        return Findings(f"it holds no optimizer state ({WEIGHTS_ONLY_HINT})")
    spare = [one.text for one in found if _is_spare(checkpoint, one)]
    changes = [one.text for one in found if one.text not in spare]
    changes += [f"{name} is missing" for name in random_states(world_size) if not (checkpoint / name).is_file()]
    changes += _torn_states(checkpoint)
    if step_of(checkpoint) not in (-1, state["global_step"]):  # a renamed copy would count as the newest
        changes.append(f"{STATE} is of step {state['global_step']}")
    return Findings(None, tuple(dict.fromkeys(changes)), tuple(spare))


def _is_spare(checkpoint: Path, one: Difference) -> bool:
    if one.name == "config.json":  # optional: read only if it exists
        return not (checkpoint / one.name).exists()
    return not READ.fullmatch(one.name) and one.name not in OF_LOOPS


def has_optimizer(checkpoint: Path) -> bool:
    return any((checkpoint / name).exists() for name in OPTIMIZER_STATES)


def _damage(checkpoint: Path, state: Optional[dict[str, Any]], found: list[Difference]) -> Optional[str]:
    reasons = [_damage_of_state(state)]
    reasons += [one.text for one in found if one.is_torn and _is_torn(checkpoint / one.name, one.name)]
    reasons += [_unreadable(checkpoint), _lost_weights(checkpoint, found), _rotten(checkpoint, found)]
    return next((reason for reason in reasons if reason is not None), None)


def _is_torn(path: Path, name: str) -> bool:
    """Return whether a file that is shorter than written is really torn: a complete file was replaced on purpose."""
    if name == MANIFEST:
        return True
    if not READ.fullmatch(name):
        return False
    if path.suffix == ".json":
        return read_object_or_none(path) is None
    return not (is_safetensors(path) if path.suffix == ".safetensors" else _is_zip(path))


def _damage_of_state(content: Optional[dict[str, Any]]) -> Optional[str]:
    if content is None:
        return f"{STATE} is missing or incomplete, so the run ended while writing it"
    if "global_step" not in content:
        return f"{STATE} has no global_step"
    known = {name: hint for name, hint in NEEDED_OF_STATE.items() if name in content}
    unknown = [f"{name} is not known" for name in content if name not in FIELDS_OF_STATE]
    wrong = first_misfit([*(misfit(content[name], hint, name) for name, hint in known.items()), *unknown])
    return None if wrong is None else f"{STATE} is not what the Trainer writes: {wrong}"


def _unreadable(checkpoint: Path) -> Optional[str]:
    """Return which weights or optimizer file lacks its end or its beginning. No content is read."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        if WEIGHTS.fullmatch(path.name) and not is_safetensors(path):
            return f"{path.name} is damaged"
    for pattern in ZIPPED:
        torn = next((path for path in sorted(checkpoint.glob(pattern)) if _is_torn_zip(path)), None)
        if torn is not None:
            return f"{torn.name} is damaged"
    for index in sorted(checkpoint.glob("*.index.json")):
        parts = (read_object_or_none(index) or {}).get("weight_map")
        if not isinstance(parts, dict):
            return f"{index.name} is damaged"
        missing = next((name for name in parts.values() if not (checkpoint / str(name)).is_file()), None)
        is_whole = any((checkpoint / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))
        if missing is not None and not is_whole:
            return f"{missing} is missing, although {index.name} names it"
    return None


def _is_torn_zip(path: Path) -> bool:
    """Return whether a file of ``torch.save`` is torn: no file, an empty one, or a zip archive without its end."""
    if not path.is_file():
        return True
    with open(path, "rb") as file:
        begins = file.read(2)
    return not _is_zip(path) if begins == b"PK" else not begins  # other beginnings: an older format


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # its last record names several disks
        return False


def _lost_weights(checkpoint: Path, found: list[Difference]) -> Optional[str]:
    """Return which weights are gone, if no other files replace them: weights may be split into files in any way."""
    lost = [one for one in found if WEIGHTS.fullmatch(one.name) and not (checkpoint / one.name).exists()]
    others = [path for path in checkpoint.iterdir() if WEIGHTS.fullmatch(path.name)]
    return lost[0].text if lost and not others else None


def _rotten(checkpoint: Path, found: list[Difference]) -> Optional[str]:
    """Return which changed torch archive is corrupted, as its own checksums show, and not replaced on purpose."""
    for one in found:
        path = checkpoint / one.name
        if any(path.match(pattern) for pattern in ZIPPED) and _is_zip(path):
            try:
                with zipfile.ZipFile(path) as archive:
                    bad = archive.testzip()
            except UNREADABLE_ZIP:
                bad = path.name
            if bad is not None:
                return f"{one.text}, and {bad} in it is damaged"
    return None


def _torn_states(checkpoint: Path) -> list[str]:
    """Return which states of loops are torn. A run without these loops does not need them."""
    existing = [checkpoint / name for name in TENSORS if os.path.lexists(checkpoint / name)]
    torn = [f"{path.name} is missing" for path in existing if not is_safetensors(path)]
    for name in SHAPES:
        if os.path.lexists(checkpoint / name):
            try:
                read_state(checkpoint / name)
            except CheckpointError as error:
                torn.append(str(error).partition(": resume from")[0])
    return torn


def saved_step(checkpoint: Path) -> int:
    """Return the step of an undamaged checkpoint."""
    return int(read_object_or_none(checkpoint / STATE)["global_step"])


def random_states(world_size: Optional[int]) -> list[str]:
    """Return the names of the files that each rank writes itself."""
    if world_size is None:
        return []
    return ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
