"""Refuse to run code from a model or checkpoint that is loaded, unless the user allows it.

- Pickled weights (``pytorch_model.bin``, ``adapter_model.bin``) are read only with ``allow_pickle``, and then with
  ``weights_only``, which accepts nothing but tensors and plain values.
- Checkpoints of DeepSpeed and of sharded FSDP cannot be read like that: reading them runs the code in them.
- Python files of a model run only with ``trust_remote_code``, after a warning that lists the files and their hashes.
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
"""Checkpoint files that are unpickled unrestricted: of DeepSpeed (``latest`` names any folder), and of sharded FSDP."""

CONFIGS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")

_announced: set[tuple[str, ...]] = set()


# -- pickle ------------------------------------------------------------------------------------------------------------


def require_safe_weights(source: str, settings: ModelSettings) -> None:
    """Raise ModelError if ``source``, a folder or Hub id, has its weights only as pickle and ``allow_pickle`` is off. A
    source without any weights passes; loading it reports that."""
    from transformers.utils import has_file

    revision = settings.model_revision
    if any(has_file(source, name, revision=revision) for name in SAFE_WEIGHTS):
        return
    found = next((name for name in PICKLED_WEIGHTS if has_file(source, name, revision=revision)), None)
    if found is not None:
        _refuse_or_warn(source, found, SAFE_WEIGHTS[0], settings.allow_pickle)


def safetensors_only(settings: ModelSettings) -> Optional[bool]:
    """Return ``use_safetensors`` for ``from_pretrained``; safetensors are preferred even if pickle is allowed. Also
    turns off the conversion of pickled weights on the Hub, which transformers would request in the user's name."""
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "true")
    return None if settings.allow_pickle else True


def require_safe_adapter(folder: Path, allow_pickle: bool) -> None:
    """Raise ModelError if the adapter in ``folder`` has its weights only as pickle, unless ``allow_pickle``."""
    if not (folder / SAFE_ADAPTER).is_file() and (folder / PICKLED_ADAPTER).is_file():
        _refuse_or_warn(str(folder), PICKLED_ADAPTER, SAFE_ADAPTER, allow_pickle)


def _refuse_or_warn(source: str, found: str, wanted: str, allow: bool) -> None:
    if not allow:
        raise ModelError(
            f"{source} has its weights in {found}, a pickle file, and no {wanted}: a pickle can contain code "
            f"instead of weights. {_conversion_hint(source, found, wanted)}or set allow_pickle: true, which reads "
            "tensors and plain values and refuses everything else"
        )
    logger.warning("%s has no %s: its weights are read from the pickle file %s, tensors only", source, wanted, found)


def _conversion_hint(source: str, found: str, wanted: str) -> str:
    """Return the sentence with the command that converts a single pickle file in a folder to safetensors; in other
    cases it asks for another repository or revision. Raises ModelError if Git LFS did not fetch the file."""
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
    """Raise CheckpointError if reading the checkpoint in ``path`` would run code from its files, unless ``allow``. This
    concerns checkpoints of DeepSpeed and of sharded FSDP; others are read with ``weights_only``. ``allow`` is whether
    this run wrote the checkpoint itself, or the user set ``allow_pickle``."""
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
    """Turn torch's error about a file that holds more than tensors and plain values into a CheckpointError."""
    from torch.serialization import safe_globals

    try:
        # Only a run that uses such an optimizer reads its state, and so has loaded its module.
        loaded = ((sys.modules[module], name) for module, name in PROJECTORS if module in sys.modules)
        with safe_globals([getattr(module, name) for module, name in loaded]):
            yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"a file of {checkpoint} is damaged or holds more than tensors and plain values, and was not read "
            f"({unpickling_reason(error)}); resume from another checkpoint"
        ) from error


PROJECTORS = (
    ("galore_torch.galore_projector", "GaLoreProjector"),
    ("apollo_torch.random_projector", "GradientProjector"),
)
"""Classes in the optimizer states of GaLore and APOLLO: they hold numbers and a matrix, and run no code when loaded."""


def unpickling_reason(error: BaseException) -> str:
    """Return what torch found in the file, without torch's instructions for loading it anyway."""
    match = re.search(r"(?:Unsupported|unsupported) [^\n]*?(?=\.? Please use|\n|$)", str(error))
    return match[0] if match else "not what torch.save writes"


# -- code that comes with a model --------------------------------------------------------------------------------------


def warn_about_code(source: str, settings: ModelSettings) -> None:
    """With ``trust_remote_code``, warn with the path and SHA-256 of every Python file that ``source`` may run. Warns
    once for the same files with the same content. Runs none of them."""
    if not settings.trust_remote_code:
        return
    files = code_files(source, settings.model_revision)
    lines = tuple(f"{name}  sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in files.items())
    if not lines or lines in _announced:
        return
    _announced.add(lines)
    pin = "" if Path(source).is_dir() else "; set model_revision to a commit to keep it from changing"
    logger.warning(
        "trust_remote_code: %s contains Python code that runs with all your rights%s: %s", source, pin, "; ".join(lines)
    )


def code_files(source: str, revision: Optional[str]) -> dict[str, Path]:
    """Return the Python files that the configuration files of ``source`` (a folder or Hub id) name, by readable name.
    Includes the files that these import with relative imports. Files on the Hub are downloaded, not run."""
    from transformers.dynamic_module_utils import get_relative_imports

    found: dict[str, Path] = {}
    pending = [reference for name in CONFIGS for reference in _code_references(source, name, revision)]
    while pending:
        owner, module = pending.pop(0)
        path = _fetched(owner, f"{module}.py", revision if owner == source else None)
        name = f"{owner}/{module}.py"
        if path is not None and name not in found:
            found[name] = path
            pending += [(owner, imported.replace(".", "/")) for imported in sorted(get_relative_imports(path))]
    return found


def _code_references(source: str, config: str, revision: Optional[str]) -> list[tuple[str, str]]:
    """Return (folder or repository, module) of each class in the ``auto_map`` of a configuration file."""
    path = _fetched(source, config, revision)
    entries: Any = {} if path is None else json.loads(path.read_text())
    values = _flat_strings(entries.get("auto_map") if isinstance(entries, dict) else None)
    parts = [value.rpartition("--") for value in values]
    return [(owner or source, reference.rpartition(".")[0]) for owner, _, reference in parts]


def _flat_strings(value: Any) -> list[str]:
    """Return all strings in a value of ``auto_map``: a tokenizer names a slow and a fast class, and one may be null."""
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inside for text in _flat_strings(item)]


def _fetched(source: str, name: str, revision: Optional[str]) -> Optional[Path]:
    from transformers.utils import cached_file

    path = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def needs_code(error: BaseException) -> bool:
    """Return whether transformers raised ``error`` because the model can only be loaded with its own Python code."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def code_refusal(source: str, revision: Optional[str]) -> ModelError:
    """Return the error for a model that needs its own Python code, with the names of the files."""
    names = ", ".join(code_files(source, revision)) or "its own Python files"
    return ModelError(
        f"{source!r} can only be loaded by running code that comes with it ({names}); read it, and set "
        "trust_remote_code: true (--trust_remote_code) if you trust it, or give a model that transformers knows"
    )
