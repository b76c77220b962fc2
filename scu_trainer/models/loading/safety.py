"""What may run code when a model or a checkpoint is loaded, and what is asked before it does.

- Weights in pickle files (``pytorch_model.bin``, ``adapter_model.bin``) are not read unless ``allow_pickle`` says so,
  and then with ``weights_only``: tensors and plain values, or nothing.
- Checkpoints of DeepSpeed and sharded FSDP can be read in no such way: reading them runs what is in them.
- Python that comes with a model runs only under ``trust_remote_code``, after its files and their hashes are named.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from scu_trainer.errors import CheckpointError, ModelError
from scu_trainer.run_files import NOT_FETCHED, is_not_fetched
from scu_trainer.settings import ModelSettings

logger = logging.getLogger("scu_trainer")

SAFE_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
SAFE_ADAPTER, PICKLED_ADAPTER = "adapter_model.safetensors", "adapter_model.bin"

RUNS_CODE = ("global_step*/*.pt", "latest", "*/.metadata")
"""In a checkpoint: the files of DeepSpeed (``latest`` names a folder, which may be any), and of a state that FSDP has
sharded. Their readers unpickle anything."""

CONFIGS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")

_announced: set[tuple[str, ...]] = set()


# -- pickle ------------------------------------------------------------------------------------------------------------


def require_safe_weights(source: str, settings: ModelSettings) -> None:
    """Raise ModelError where the weights of ``source``, a folder or Hub id, are stored as pickle only, unless
    ``allow_pickle``; a source without any weights is left to whoever loads it."""
    from transformers.utils import has_file

    revision = settings.model_revision
    if any(has_file(source, name, revision=revision) for name in SAFE_WEIGHTS):
        return
    found = next((name for name in PICKLED_WEIGHTS if has_file(source, name, revision=revision)), None)
    if found is not None:
        _refuse_or_warn(source, found, SAFE_WEIGHTS[0], settings.allow_pickle)


def safetensors_only(settings: ModelSettings) -> Optional[bool]:
    """What ``from_pretrained(use_safetensors=...)`` takes; with pickle allowed safetensors still come first.

    Nothing is converted on the Hub meanwhile: transformers would ask a server to, in the user's name.
    """
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "true")
    return None if settings.allow_pickle else True


def require_safe_adapter(folder: Path, allow_pickle: bool) -> None:
    """Raise ModelError where the weights of the adapter in ``folder`` are stored as pickle only, unless allowed."""
    if not (folder / SAFE_ADAPTER).is_file() and (folder / PICKLED_ADAPTER).is_file():
        _refuse_or_warn(str(folder), PICKLED_ADAPTER, SAFE_ADAPTER, allow_pickle)


def _refuse_or_warn(source: str, found: str, wanted: str, allow: bool) -> None:
    if not allow:
        raise ModelError(
            f"{source} has its weights in {found}, a pickle file, and no {wanted}: a pickle can contain code "
            f"instead of weights. {_conversion(source, found, wanted)}or set allow_pickle: true, which reads tensors "
            "and plain values and refuses everything else"
        )
    logger.warning("%s has no %s: its weights are read from the pickle file %s, tensors only", source, wanted, found)


def _conversion(source: str, found: str, wanted: str) -> str:
    """What to type for a single file in a folder; a set of files needs its index written as well."""
    file = Path(source) / found
    if file.is_file() and is_not_fetched(file):
        raise ModelError(f"{file} {NOT_FETCHED}")
    if file.suffix != ".bin" or not file.is_file():
        return "Give a repository or revision with safetensors, "
    code = (
        "import torch, safetensors.torch as s; "
        f'w = torch.load({json.dumps(str(file))}, weights_only=True, map_location="cpu"); '
        "s.save_file({k: v.clone().contiguous() for k, v in w.items()}, "
        f'{json.dumps(str(file.with_name(wanted)))}, {{"format": "pt"}})'
    )
    return f"Convert it once: python -c {shlex.quote(code)}, "


def refuse_pickle(path: Path, allow: bool) -> None:
    """Raise CheckpointError where reading the checkpoint in ``path`` would run whatever its files say.

    These are checkpoints of DeepSpeed, and of FSDP in shards. ``allow``: the checkpoint is one that this run wrote
    itself, or the user said ``allow_pickle``. The stock ones are read with ``weights_only`` and need no consent.
    """
    found = next((file for pattern in RUNS_CODE for file in sorted(Path(path).glob(pattern))), None)
    if found is None or allow:
        return
    raise CheckpointError(
        f"{path} is outside this run, and {found.relative_to(path)} in it can only be read by running code from "
        f"the file; set output_dir to the run that wrote it to resume there, set allow_pickle: true if "
        f"you trust the person who wrote it, or start from its weights with model_name_or_path {path}"
    )


@contextlib.contextmanager
def tensors_only(checkpoint: Optional[str | Path]) -> Iterator[None]:
    """What torch says of a file that holds more than tensors and plain values becomes one CheckpointError."""
    from torch.serialization import safe_globals

    try:
        # Of the optimizers that this process has loaded: no other run reads them.
        loaded = ((sys.modules[module], name) for module, name in PROJECTORS if module in sys.modules)
        with safe_globals([getattr(module, name) for module, name in loaded]):
            yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"a file of {checkpoint} is damaged or holds more than tensors and plain values, and was not read "
            f"({reason_of(error)}); resume from another checkpoint"
        ) from error


PROJECTORS = (
    ("galore_torch.galore_projector", "GaLoreProjector"),
    ("apollo_torch.random_projector", "GradientProjector"),
)
"""What GaLore and APOLLO keep in an optimizer's state beside tensors: numbers and a matrix, without code of their own
where they are read."""


def reason_of(error: BaseException) -> str:
    """Of the page that torch writes what was found; the rest is how to run it all the same."""
    found = re.search(r"(?:Unsupported|unsupported) [^\n]*?(?=\.? Please use|\n|$)", str(error))
    return found[0] if found else "not what torch.save writes"


# -- code that comes with a model --------------------------------------------------------------------------------------


def announce_code(source: str, settings: ModelSettings) -> None:
    """Under ``trust_remote_code``: warn with the path and SHA-256 of every Python file that ``source`` may run, once
    for each content. Nothing is run here."""
    if not settings.trust_remote_code:
        return
    files = code_files(source, settings.model_revision)
    lines = tuple(f"{name}  sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in files.items())
    if not lines or lines in _announced:
        return
    _announced.add(lines)
    pin = "" if Path(source).is_dir() else "; model_revision with a commit keeps it from changing"
    logger.warning(
        "trust_remote_code: %s contains Python code that runs with all your rights%s: %s", source, pin, "; ".join(lines)
    )


def code_files(source: str, revision: Optional[str]) -> dict[str, Path]:
    """Readable name and place of each Python file that the configuration files of ``source`` (folder or Hub id) name,
    and of those that these import relatively. Files on the Hub are fetched, not run."""
    from transformers.dynamic_module_utils import get_relative_imports

    found: dict[str, Path] = {}
    pending = [reference for name in CONFIGS for reference in _references(source, name, revision)]
    while pending:
        owner, module = pending.pop(0)
        path = _fetched(owner, f"{module}.py", revision if owner == source else None)
        name = f"{owner}/{module}.py"
        if path is not None and name not in found:
            found[name] = path
            pending += [(owner, imported.replace(".", "/")) for imported in sorted(get_relative_imports(path))]
    return found


def _references(source: str, config: str, revision: Optional[str]) -> list[tuple[str, str]]:
    """(folder or repository, module) of each class in the ``auto_map`` of a configuration file."""
    path = _fetched(source, config, revision)
    entries: Any = {} if path is None else json.loads(path.read_text())
    values = _flat(entries.get("auto_map") if isinstance(entries, dict) else None)
    parts = [value.rpartition("--") for value in values]
    return [(owner or source, reference.rpartition(".")[0]) for owner, _, reference in parts]


def _flat(value: Any) -> list[str]:
    """The texts in ``auto_map``: a tokenizer names a slow and a fast class, either of which may be null."""
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inside for text in _flat(item)]


def _fetched(source: str, name: str, revision: Optional[str]) -> Optional[Path]:
    from transformers.utils import cached_file

    path = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def needs_code(error: BaseException) -> bool:
    """Whether this is how transformers refuses a model that only its own Python can load."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def code_refusal(source: str, revision: Optional[str]) -> ModelError:
    names = ", ".join(code_files(source, revision)) or "Python files of its own"
    return ModelError(
        f"{source!r} can only be loaded by running code that comes with it ({names}); read it, and set "
        "trust_remote_code: true (--trust_remote_code) if you trust it, or give a model that transformers knows"
    )
