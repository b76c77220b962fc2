"""What the name of a model stands for: a folder, an adapter with its base, an id of the Hub; and what is said where it
cannot be used."""

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
from scu_trainer.models.loading.possible import require_sane_config
from scu_trainer.models.loading.safety import code_refusal, needs_code, reason_of
from scu_trainer.models.published import ADAPTER, PROCESSOR
from scu_trainer.run_files import NOT_FETCHED, found_above, is_not_fetched, read_regular
from scu_trainer.settings import ModelSettings


def check_source(name_or_path: str, what: str = "model", typed: str = "model_name_or_path ") -> None:
    """Raise ModelError for a path that is no model, without touching the network. Hub ids pass. For the message:
    ``what`` is wanted of it, and ``typed`` is what one gave it by, such as a setting, with a space behind it."""
    path = Path(name_or_path).expanduser()
    looks_local = name_or_path.startswith((".", "/", "~")) or path.exists() or name_or_path.count("/") > 1
    if not looks_local:
        return
    if not path.is_dir():
        found = "is a file" if path.exists() else f"does not exist{near_folder(name_or_path)}"
        raise ModelError(f"{typed}{name_or_path!r} {found}; give a folder with a config.json, or a Hub id")
    if not (path / "config.json").is_file() and not is_adapter(path):
        if any(path.glob("pytorch_model_fsdp*")):
            raise ModelError(
                f"{typed}{name_or_path!r} is a checkpoint that FSDP wrote in shards, which only its run can read; "
                "resume that run, which writes the whole model at its end"
            )
        raise ModelError(
            f"{typed}{name_or_path!r} is a folder without config.json or adapter_config.json; give the "
            f"folder that save_pretrained wrote{_model_below(path)}"
        )
    if (path / "config.json").is_file():
        require_sane_config(path / "config.json", what)


def _model_below(path: Path) -> str:
    """peft saves an adapter that has a name of its own in a folder of that name, the stock Trainer in checkpoints."""
    found = {file.parent for kind in ("config", "adapter_config") for file in path.glob(f"*/{kind}.json")}
    if not found:
        return ""
    newest = max(found, key=lambda folder: (len(folder.name), folder.name))
    return f", such as the {'adapter' if is_adapter(newest) else 'model'} {newest}"


def is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").is_file()


def located(name: str) -> str:
    """A folder with ``~`` written out, which the libraries take for part of a Hub id; Hub ids as they are."""
    path = Path(name).expanduser()
    return str(path) if path.is_dir() else name


def base_of(name: Union[str, Path]) -> str:
    """The folder or Hub id of the base model that an adapter was trained on; ``name`` itself, as ``located`` has it,
    when it is no adapter.

    Raises ModelError if the adapter does not tell, or if its base is a folder that is gone.
    """
    adapter = Path(located(str(name)))
    if not is_adapter(adapter):
        return str(adapter)
    config_file = adapter / "adapter_config.json"
    with as_model_error(str(adapter), "adapter"):
        config = json.loads(read_regular(config_file))
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not base or not isinstance(base, str) or "\0" in base:
        raise ModelError(f"{config_file} does not name the base model; set base_model_name_or_path in it")
    base = found_base(base, adapter)
    try:
        check_source(base)
    except ModelError as error:
        raise ModelError(f"the adapter {adapter} needs its base model: {error}; {_names_base(adapter)}") from error
    return located(base)


def _names_base(adapter: Path) -> str:
    return f"{adapter / 'adapter_config.json'} names it: set its base_model_name_or_path to where it is"


def found_base(name: str, folder: Path) -> str:
    """See ``found_above``. Of a name alone, which can be a Hub id as well, a run is not the base of those beside it."""

    def is_base(path: Path) -> bool:
        is_run = (path / "run.json").is_file()
        return (path / "config.json").is_file() and (len(Path(name).parts) > 1 or not is_run)

    return found_above(name, folder, is_base)


def downloaded_adapter(name: Optional[str], revision: Optional[str] = None) -> Optional[Path]:
    """The folder in the cache of the Hub with the adapter of this id; None for everything else: what lies here, a full
    model, and what the Hub does not have, as who loads it says."""
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


def prompt_of_adapter(name: str) -> int:
    """Positions that an adapter's learned prompt takes; 0 for one without, and for a model."""
    adapter = Path(located(name))
    return (_in_config(adapter, "num_virtual_tokens") or 0) if is_adapter(adapter) else 0


def _in_config(adapter: Path, name: str) -> Any:
    with as_model_error(str(adapter), "adapter"):
        return json.loads(read_regular(adapter / "adapter_config.json")).get(name)


def rows_of_adapter(adapter: Path) -> int:
    """Rows that the embedding needs for the tokens which an adapter has trained; 0 for one without."""
    found = _in_config(adapter, "trainable_token_indices") or {}
    rows = found.values() if isinstance(found, dict) else [found]
    return 1 + max((row for some in rows for row in some), default=-1)


def with_adapter_as_model(settings: ModelSettings) -> ModelSettings:
    """``adapter_name_or_path`` as the model to go on with. Raises ModelError where it is none, or of another base."""
    name, revision = settings.adapter_name_or_path or settings.model_name_or_path, settings.model_revision
    found = downloaded_adapter(name, revision)
    if found is not None:
        settings = replace(settings, model_revision=None)  # which was that of the adapter
    if settings.adapter_name_or_path is None:
        return settings if found is None else replace(settings, model_name_or_path=str(found))
    adapter = found or Path(settings.adapter_name_or_path).expanduser()
    if not is_adapter(adapter):
        raise ModelError(
            f"adapter_name_or_path {settings.adapter_name_or_path!r} is neither a folder with an adapter_config.json "
            "nor an adapter on the Hub; give the folder that a run wrote, or the id"
        )
    base, given = base_of(adapter), settings.model_name_or_path
    if given is not None and _place(base) != _place(given):
        raise ModelError(
            f"the adapter {adapter} was trained on {base}, and model_name_or_path is {given}; give that base, or leave "
            "model_name_or_path out"
        )
    return replace(settings, model_name_or_path=str(adapter), adapter_name_or_path=None)


def _place(name: str) -> Union[str, Path]:
    """Of a folder by any path to it; a Hub id is no path."""
    path = Path(located(name))
    return path.resolve() if path.is_dir() else name


STUMBLES = (AttributeError, IndexError, ArithmeticError, AssertionError, TypeError, KeyError)
"""What a library runs into that computes with files nobody has looked at: zero heads, text for a number."""


@contextlib.contextmanager
def as_model_error(
    name: str, what: str, revision: Optional[str] = None, asked_for: Optional[str] = None
) -> Iterator[None]:
    """What transformers raises for a name it cannot use becomes one ModelError. ``asked_for``: what a person named;
    where it is an adapter, ``name`` is its base."""
    try:
        yield
    except Exception as error:
        import torch
        from safetensors import SafetensorError

        # The tokenizers library, which is no Python, raises nothing more narrow than Exception itself.
        is_of_the_files = isinstance(error, loading_errors()) or type(error) is Exception
        if not is_of_the_files or isinstance(error, (UserError, torch.OutOfMemoryError)):
            raise
        if needs_code(error):
            raise code_refusal(located(name), revision) from error
        first, hint = _first_line(error), ""
        if (file := _not_fetched_file(name)) is not None:
            first = f"{file} {NOT_FETCHED}"
        elif isinstance(error, SafetensorError):
            hint = f"; {_torn_file(name)} is damaged or cut off: copy or download it again"
        elif not Path(name).expanduser().exists():
            hint = f"; there is no folder {name} here{near_folder(name)}"
            hint += "; if it is a Hub id, check its spelling and the connection"
            adapter = Path(asked_for or "").expanduser()
            if is_adapter(adapter):
                hint += f"; {_names_base(adapter)}"
        elif (file := _unreadable_file(name)) is not None:  # which safetensors calls "no such file"
            first, hint = f"{file} is there, but this user may not read it", f"; chmod a+r {shlex.quote(str(file))}"
        first = first.rstrip(".") if hint else first
        raise ModelError(f"cannot load the {what} of {name!r}: {first}{hint}") from error


def near_folder(name: str) -> str:
    """Phrase that names the nearest of the folders beside a path that is not there; nothing for a name alone."""
    path = Path(name).expanduser()
    beside = [other.name for other in path.parent.glob("*") if os.path.isdir(other)] if path.parent.name else []
    near = get_close_matches(path.name, beside, n=1, cutoff=NEAR)  # the same folder above makes no two names alike
    return f" (did you mean {str(path.parent / near[0])!r}?)" if near else ""


def _not_fetched_file(name: str) -> Optional[Path]:
    files = sorted(path for path in Path(name).expanduser().glob("*") if path.is_file() and os.access(path, os.R_OK))
    return next((file for file in files if is_not_fetched(file)), None)


def _torn_file(name: str) -> str:
    """The first weights file of a folder that cannot be opened."""
    files = sorted(Path(name).expanduser().glob("*.safetensors"))
    return next((str(file) for file in files if not is_safetensors(file)), "its weights file")


def _unreadable_file(name: str) -> Optional[Path]:
    files = sorted(Path(name).expanduser().glob("*.safetensors"))
    return next((file for file in files if file.is_file() and not os.access(file, os.R_OK)), None)


def is_safetensors(path: Path) -> bool:
    """Its header says how long the file must be, and opening it compares that."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            return True
    except (SafetensorError, OSError):
        return False


def _first_line(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):
        return f"its pickle file is damaged or holds more than tensors, and was not read ({reason_of(error)})"
    first = str(error).strip().splitlines()[0].strip() if str(error).strip() else type(error).__name__
    if first.endswith(":"):  # a list follows
        first = " ".join(str(error).split())[:300]
    if isinstance(error, STUMBLES):
        return f"its files do not hold what the library expects there ({type(error).__name__}: {first})"
    return first


def loading_errors() -> tuple[type[Exception], ...]:
    """What the libraries raise for files that are torn, of another kind, or in need of a package."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    builtin = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, UserWarning, pickle.UnpicklingError)
    return (*builtin, *STUMBLES, StrictDataclassError, SafetensorError)
