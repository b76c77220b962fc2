"""Resolve the name of a model (a folder, an adapter with its base model, or a Hub id), and explain names that fail."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shlex
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Optional, Union

from scu_trainer.errors import NEAR, ModelError, UserError
from scu_trainer.json_types import misfit
from scu_trainer.models.loading.possible import require_sane_config
from scu_trainer.models.loading.safety import code_refusal, needs_code, unpickling_reason
from scu_trainer.models.published import ADAPTER, PROCESSOR
from scu_trainer.run_files import NOT_FETCHED, is_not_fetched, read_regular, resolve_from_run
from scu_trainer.settings import ModelSettings


def check_source(name_or_path: str, what: str = "model", typed: str = "model_name_or_path ") -> None:
    """Raise ModelError for a local path that does not hold a model, without using the network; Hub ids pass. For the
    message, ``what`` is to be loaded, and ``typed`` is the setting or flag that gave the name, followed by a space."""
    path = Path(name_or_path).expanduser()
    looks_local = name_or_path.startswith((".", "/", "~")) or path.exists() or name_or_path.count("/") > 1
    if not looks_local:
        return
    if not path.is_dir():
        found = "is a file" if path.exists() else f"does not exist{nearest_folder_hint(name_or_path)}"
        raise ModelError(f"{typed}{name_or_path!r} {found}; give a folder with a config.json, or a Hub id")
    if not (path / "config.json").is_file() and not is_adapter(path):
        if any(path.glob("pytorch_model_fsdp*")):
            raise ModelError(
                f"{typed}{name_or_path!r} is a checkpoint that FSDP wrote in shards, which only its run can read; "
                "resume that run, which writes the whole model when it ends"
            )
        raise ModelError(
            f"{typed}{name_or_path!r} is a folder without config.json or adapter_config.json; give the "
            f"folder that save_pretrained wrote{_model_below(path)}"
        )
    if (path / "config.json").is_file():
        require_sane_config(path / "config.json", what)


def _model_below(path: Path) -> str:
    """Return a phrase that names the newest model or adapter in a subfolder; "" if there is none. peft saves a named
    adapter in a subfolder, and the stock Trainer saves checkpoints there."""
    found = {file.parent for kind in ("config", "adapter_config") for file in path.glob(f"*/{kind}.json")}
    if not found:
        return ""
    newest = max(found, key=lambda folder: (len(folder.name), folder.name))
    return f", such as the {'adapter' if is_adapter(newest) else 'model'} {newest}"


def is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").is_file()


def expanded_name(name: str) -> str:
    """Return a folder with ``~`` expanded, which the libraries take for part of a Hub id; a Hub id unchanged."""
    path = Path(name).expanduser()
    return str(path) if path.is_dir() else name


def base_of(name: Union[str, Path]) -> str:
    """Return the folder or Hub id of an adapter's base model; for other names, what ``expanded_name`` returns. Raises
    ModelError if the adapter does not name its base, or if that folder no longer exists."""
    adapter = Path(expanded_name(str(name)))
    if not is_adapter(adapter):
        return str(adapter)
    base = adapter_config_in(adapter).get("base_model_name_or_path")
    if not base or "\0" in base or not _is_unicode(base):
        raise ModelError(
            f"{adapter / 'adapter_config.json'} does not name the base model; set base_model_name_or_path in it"
        )
    base = find_base_folder(base, adapter)
    try:
        check_source(base)
    except ModelError as error:
        raise ModelError(f"the adapter {adapter} needs its base model: {error}; {_base_hint(adapter)}") from error
    return expanded_name(base)


def _is_unicode(text: str) -> bool:
    """Whether ``text`` has no surrogates, which JSON can hold but no file name."""
    return text.encode(errors="ignore").decode() == text


def _base_hint(adapter: Path) -> str:
    return f"{adapter / 'adapter_config.json'} names that base; set base_model_name_or_path there to where it is"


def find_base_folder(name: str, folder: Path) -> str:
    """Return where the base model ``name`` of the adapter in ``folder`` is, see ``resolve_from_run``. A name without a
    slash can also be a Hub id, so a run of that name next to the adapter does not count as its base."""

    def is_base(path: Path) -> bool:
        is_run = (path / "run.json").is_file()
        return (path / "config.json").is_file() and (len(Path(name).parts) > 1 or not is_run)

    return resolve_from_run(name, folder, is_base)


def downloaded_adapter(name: Optional[str], revision: Optional[str] = None) -> Optional[Path]:
    """Download the adapter with this Hub id and return its folder in the Hub's cache. Returns None for local paths,
    full models, and names that the Hub does not have; loading reports the latter."""
    from transformers.utils.peft_utils import find_adapter_config_file

    if name is None or Path(name).expanduser().exists():
        return None
    try:
        config_file = find_adapter_config_file(name, revision=revision)
    except (OSError, ValueError):
        return None
    if config_file is None:
        return None
    from huggingface_hub import snapshot_download

    with as_model_error(name, "adapter", revision):
        patterns = [*ADAPTER, "adapter_model.bin", *PROCESSOR]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def prompt_positions_of(name: str) -> int:
    """Return how many positions an adapter's learned prompt takes; 0 without a prompt, and for a full model."""
    adapter = Path(expanded_name(name))
    return (adapter_config_in(adapter).get("num_virtual_tokens") or 0) if is_adapter(adapter) else 0


OF_ADAPTER = {
    "base_model_name_or_path": (Optional[str], "text"),
    "num_virtual_tokens": (Optional[int], "a whole number"),
    "trainable_token_indices": (Union[list[int], dict[str, list[int]], None], "a list of token ids, or one per module"),
    "alora_invocation_tokens": (Optional[list[int]], "a list of token ids"),
}
"""Types of the fields of an adapter_config.json that we read, or that peft reads without a check, and their names."""

MOST_TOKENS = 2**24
"""No vocabulary has more tokens; the largest have a quarter of a million."""


def adapter_config_in(adapter: Path) -> dict[str, Any]:
    """Return the content of the adapter_config.json of a folder. Raises ModelError if it is damaged."""
    file = adapter / "adapter_config.json"
    with as_model_error(str(adapter), "adapter"):
        config = json.loads(read_regular(file))
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}; it must be what save_pretrained wrote")
    for name, (kind, words) in OF_ADAPTER.items():
        if wrong := misfit(config.get(name), kind, name):
            raise ModelError(f"{file}: {wrong}; it must be {words}, correct it")
    for token in (*_trained_rows(config), *(config.get("alora_invocation_tokens") or ())):
        if not 0 <= token < MOST_TOKENS:
            raise ModelError(f"{file}: {token} is not the id of a token; correct it")
    return config


def _trained_rows(config: dict[str, Any]) -> list[int]:
    """Return the token ids whose rows of an embedding an adapter trained."""
    indices = config.get("trainable_token_indices") or []
    return [row for rows in indices.values() for row in rows] if isinstance(indices, dict) else indices


def embedding_rows_of_adapter(adapter: Path) -> int:
    """Return how many rows the embedding needs for the tokens that an adapter trained; 0 if it trained none."""
    return 1 + max(_trained_rows(adapter_config_in(adapter)), default=-1)


def with_adapter_as_model(settings: ModelSettings) -> ModelSettings:
    """Return ``settings`` with the adapter of ``adapter_name_or_path`` as ``model_name_or_path``, downloaded if needed.
    Raises ModelError if it is not an adapter, or belongs to another base model than ``model_name_or_path``."""
    name, revision = settings.adapter_name_or_path or settings.model_name_or_path, settings.model_revision
    found = downloaded_adapter(name, revision)
    if found is not None:
        settings = replace(settings, model_revision=None)  # the revision was the adapter's, not its base model's
    if settings.adapter_name_or_path is None:
        return settings if found is None else replace(settings, model_name_or_path=str(found))
    adapter = found or Path(settings.adapter_name_or_path).expanduser()
    if not is_adapter(adapter):
        raise ModelError(
            f"adapter_name_or_path {settings.adapter_name_or_path!r} is neither a folder with an adapter_config.json "
            "nor an adapter on the Hub; give the folder that a run wrote, or the id"
        )
    base, given = base_of(adapter), settings.model_name_or_path
    if given is not None and _resolved(base) != _resolved(given):
        raise ModelError(
            f"the adapter {adapter} was trained on {base}, but model_name_or_path is {given}; give that base, or leave "
            "model_name_or_path out"
        )
    return replace(settings, model_name_or_path=str(adapter), adapter_name_or_path=None)


def _resolved(name: str) -> Union[str, Path]:
    """Return the resolved path of a folder, so that all paths to it compare equal; a Hub id unchanged."""
    path = Path(expanded_name(name))
    return path.resolve() if path.is_dir() else name


UNCHECKED_VALUE_ERRORS = (AttributeError, IndexError, ArithmeticError, AssertionError, TypeError, KeyError)
"""Errors of libraries that compute with values they did not check, such as zero heads or text for a number."""


@contextlib.contextmanager
def as_model_error(
    name: str, what: str, revision: Optional[str] = None, asked_for: Optional[str] = None
) -> Iterator[None]:
    """Turn what the libraries raise for the model ``name`` into one ModelError. ``what`` is what is loaded, for the
    message. ``asked_for`` is the name that the user gave: if it is an adapter, ``name`` is its base model."""
    try:
        yield
    except Exception as error:
        import torch
        from safetensors import SafetensorError

        # The tokenizers library is written in Rust and raises plain Exception.
        is_loading_error = isinstance(error, loading_errors()) or type(error) is Exception
        if not is_loading_error or isinstance(error, (UserError, torch.OutOfMemoryError)):
            raise
        if needs_code(error):
            raise code_refusal(expanded_name(name), revision) from error
        first, hint = _first_line(error), ""
        if (file := _unfetched_file(name)) is not None:
            first = f"{file} {NOT_FETCHED}"
        elif isinstance(error, SafetensorError):
            hint = f"; {_damaged_file(name)} is damaged or cut off: copy or download it again"
        elif not Path(name).expanduser().exists():
            hint = f"; there is no folder {name} here{nearest_folder_hint(name)}"
            hint += "; if it is a Hub id, check its spelling and the connection"
            adapter = Path(asked_for or "").expanduser()
            if is_adapter(adapter):
                hint += f"; {_base_hint(adapter)}"
        elif (file := _unreadable_file(name)) is not None:  # safetensors reports it as "no such file"
            first, hint = f"{file} exists, but this user may not read it", f"; chmod a+r {shlex.quote(str(file))}"
        first = first.rstrip(".") if hint else first
        raise ModelError(f"cannot load the {what} of {name!r}: {first}{hint}") from error


def nearest_folder_hint(name: str) -> str:
    """Return a "did you mean" phrase with the most similar folder next to the missing path ``name``, or ""."""
    path = Path(name).expanduser()
    siblings = [other.name for other in path.parent.glob("*") if os.path.isdir(other)] if path.parent.name else []
    near = get_close_matches(path.name, siblings, n=1, cutoff=NEAR)  # only names: a shared parent makes paths similar
    return f" (did you mean {str(path.parent / near[0])!r}?)" if near else ""


def _unfetched_file(name: str) -> Optional[Path]:
    files = sorted(path for path in Path(name).expanduser().glob("*") if path.is_file() and os.access(path, os.R_OK))
    return next((file for file in files if is_not_fetched(file)), None)


def _damaged_file(name: str) -> str:
    """Return the first weight file of a folder that cannot be opened."""
    files = sorted(Path(name).expanduser().glob("*.safetensors"))
    return next((str(file) for file in files if not is_safetensors(file)), "its weights file")


def _unreadable_file(name: str) -> Optional[Path]:
    files = sorted(Path(name).expanduser().glob("*.safetensors"))
    return next((file for file in files if file.is_file() and not os.access(file, os.R_OK)), None)


def is_safetensors(path: Path) -> bool:
    """Return whether ``path`` is a whole safetensors file: opening compares its length with the one in its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            return True
    except (SafetensorError, OSError):
        return False


def _first_line(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):
        return f"its pickle file is damaged or holds more than tensors, and was not read ({unpickling_reason(error)})"
    first = str(error).strip().splitlines()[0].strip() if str(error).strip() else type(error).__name__
    if first.endswith(":"):  # a list follows
        first = " ".join(str(error).split())[:300]
    if isinstance(error, UNCHECKED_VALUE_ERRORS):
        return f"its files do not hold what the library expects there ({type(error).__name__}: {first})"
    return first


def loading_errors() -> tuple[type[Exception], ...]:
    """Return what the libraries raise for files that are damaged, of another kind, or need a missing package."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    builtin = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, UserWarning, pickle.UnpicklingError)
    return (*builtin, *UNCHECKED_VALUE_ERRORS, StrictDataclassError, SafetensorError)
