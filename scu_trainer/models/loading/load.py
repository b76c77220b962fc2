"""From a name to a model that can be tuned: where it lies, how it is loaded, which of its layers get adapters."""

from __future__ import annotations

import json
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.errors import ModelError, UserError, nearest
from scu_trainer.models.loading.adapters import (
    CAUSAL,
    AdapterPlan,
    adapter_config,
    choose_weights,
    grow_embeddings,
    save_rows_alone,
)
from scu_trainer.models.loading.causal import require_causal
from scu_trainer.models.loading.dispatch import Free, Placement, place
from scu_trainer.models.loading.mapped_files import release_mapped_files
from scu_trainer.models.loading.offloaded import adapt, adapt_as_saved, has_offloaded_weights
from scu_trainer.models.loading.possible import require_room_for, require_sane_config
from scu_trainer.models.loading.safety import (
    PICKLED_WEIGHTS,
    SAFE_WEIGHTS,
    announce_code,
    code_refusal,
    needs_code,
    reason_of,
    require_safe_adapter,
    require_safe_weights,
    safetensors_only,
)
from scu_trainer.models.published import ADAPTER, PROCESSOR
from scu_trainer.models.quantize import (
    compute_dtype_of,
    prepare_quantized,
    quantization_config,
    require_quantization,
    skeleton_of,
)
from scu_trainer.run_files import found_above, read_regular
from scu_trainer.settings import MemorySettings, ModelSettings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def check_source(name_or_path: str, what: str = "model") -> None:
    """Raise ModelError for a path that is no model, without touching the network. Hub ids pass. ``what`` is wanted of
    it, for the message."""
    path = Path(name_or_path).expanduser()
    looks_local = name_or_path.startswith((".", "/", "~")) or path.exists() or name_or_path.count("/") > 1
    if not looks_local:
        return
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ModelError(f"model_name_or_path {name_or_path!r} {found}; give a folder with a config.json, or a Hub id")
    if not (path / "config.json").is_file() and not is_adapter(path):
        raise ModelError(
            f"model_name_or_path {name_or_path!r} is a folder without config.json or adapter_config.json; give the "
            f"folder that save_pretrained wrote{_adapter_below(path)}"
        )
    if (path / "config.json").is_file():
        require_sane_config(path / "config.json", what)


def _adapter_below(path: Path) -> str:
    """peft saves an adapter that has a name of its own in a folder of that name."""
    found = sorted(path.glob("*/adapter_config.json"))
    return f", such as the adapter {found[0].parent}" if found else ""


VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of the files that hold the tokens of a tokenizer."""


def is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").is_file()


def load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to ``model_name_or_path``; an end-of-text token doubles as padding where none is
    defined."""
    from transformers import AutoTokenizer

    name = settings.model_name_or_path
    check_source(name, "tokenizer")
    source = located(name)
    if Path(source).is_dir() and not _has_tokenizer(Path(source)):
        source = base_of(Path(source))
    with as_model_error(source, "tokenizer", settings.model_revision, name):
        announce_code(source, settings)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                source, revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
            )
        except _loading_errors():
            _require_vocabulary(source, settings)
            raise

    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {name!r} has no end-of-text token; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def located(name: str) -> str:
    """A folder with ``~`` written out, which the libraries take for part of a Hub id; Hub ids as they are."""
    path = Path(name).expanduser()
    return str(path) if path.is_dir() else name


def _has_tokenizer(path: Path) -> bool:
    return (path / "tokenizer_config.json").is_file() or (path / "tokenizer.json").is_file()


def _require_vocabulary(source: str, settings: ModelSettings) -> None:
    """Raise ModelError for a folder without a tokenizer, which the library reports as one that it cannot read. A model
    of images has none because it is no language model: that is said first."""
    folder = Path(source)
    if not folder.is_dir() or any(path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        return
    require_causal(_config_of(source, settings), source)
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (folder / name).is_file()]
    raise ModelError(
        f"cannot load the tokenizer of {source!r}: there is no {' and no '.join(missing)} in that folder; copy the "
        "tokenizer files there from the base model, or write them with tokenizer.save_pretrained"
    )


def base_of(adapter: Path) -> str:
    """Name or path of the base model that an adapter folder was trained on; the folder itself when it is no adapter.

    Raises ModelError if the adapter does not tell, or if its base is a folder that is gone.
    """
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
        raise ModelError(
            f"the adapter {adapter} needs its base model: {error}; set "
            f"base_model_name_or_path in {config_file} to where it is"
        ) from error
    return base


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


def rows_of_adapter(adapter: Path) -> int:
    """Rows that the embedding needs for the tokens which an adapter has trained; 0 for one without."""
    with as_model_error(str(adapter), "adapter"):
        found = json.loads(read_regular(adapter / "adapter_config.json")).get("trainable_token_indices") or {}
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
    if given is not None and not _is_same_place(base, given):
        raise ModelError(
            f"the adapter {adapter} was trained on {base}, and model_name_or_path is {given}; give that base, or leave "
            "model_name_or_path out"
        )
    return replace(settings, model_name_or_path=str(adapter), adapter_name_or_path=None)


def _is_same_place(first: str, second: str) -> bool:
    if Path(located(first)).is_dir() and Path(located(second)).is_dir():
        return Path(located(first)).resolve() == Path(located(second)).resolve()
    return first == second


def load_model(
    settings: ModelSettings, *, device: Optional[torch.device] = None, placement: Optional[Placement] = None
) -> PreTrainedModel:
    """Base weights only (of an adapter: those it was trained on), on the CPU, in ``settings.dtype``. Full tuning in
    ``auto`` loads float32: AdamW's small steps vanish in bfloat16 weights. ``tuning: qlora``: packed into 4 or 8 bits
    on ``device`` (default: the CPU) as the files are read, and frozen. ``placement``: where else weights go.

    Raises ModelError, and RequirementError where the machine cannot quantize.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = device or torch.device("cpu")
    name = base_of(Path(located(settings.model_name_or_path)))
    check_source(settings.model_name_or_path)
    require_quantization(settings, device)
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if settings.dtype == "auto" and settings.tuning == "full":
        dtype = torch.float32
    folder = None if placement is None else placement.private_folder()
    with as_model_error(name, "model", settings.model_revision, settings.model_name_or_path):
        announce_code(located(name), settings)
        require_safe_weights(located(name), settings)
        config = _config_of(name, settings)
        require_causal(config, name)
        packing = _packing(name, settings, device)
        given: dict[str, Any] = {} if packing is None else {"quantization_config": packing}
        if placement is None:
            require_room_for(config, name, _bytes_per_weight(config, dtype, settings), settings.trust_remote_code)
        if settings.tuning == "qlora":
            given["device_map"] = {"": device}
        if placement is not None:
            given |= placement.arguments(folder)
        model, report = AutoModelForCausalLM.from_pretrained(
            located(name),
            dtype=dtype,
            revision=settings.model_revision,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=safetensors_only(settings),
            attn_implementation=settings.attn_implementation,
            ignore_mismatched_sizes=True,  # they are in the report, with their names
            output_loading_info=True,
            **given,
        )
    model.offload_folder = folder  # there as long as the model is
    _require_complete(name, report)
    if settings.tuning != "qlora":
        return model
    release_mapped_files()  # what was packed is not read again
    return prepare_quantized(model)


def causal_config(settings: ModelSettings) -> PretrainedConfig:
    """Of the model that ``load_model`` would load. Raises ModelError where it is no causal language model."""
    name = base_of(Path(located(settings.model_name_or_path)))
    check_source(settings.model_name_or_path)
    with as_model_error(name, "model", settings.model_revision, settings.model_name_or_path):
        announce_code(located(name), settings)
        config = _config_of(name, settings)
    require_causal(config, name)
    return config


def check_weights(settings: ModelSettings) -> bool:
    """Whether the folder that ``load_model`` reads holds weights. Raises ModelError as that would for a folder that is
    not whole, by the headers of its files alone."""
    from safetensors import safe_open

    name = base_of(Path(located(settings.model_name_or_path)))
    folder = Path(located(name))
    with as_model_error(name, "model", settings.model_revision, settings.model_name_or_path):
        require_safe_weights(str(folder), settings)
        whole, index = (folder / file for file in SAFE_WEIGHTS)
        parts = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else ()
        files = [whole] if whole.is_file() else [folder / part for part in sorted(parts)]
        for file in files:
            with safe_open(file, framework="pt"):
                pass
    return bool(files) or any((folder / file).is_file() for file in PICKLED_WEIGHTS)


def _packing(name: str, settings: ModelSettings, device: torch.device) -> Optional[BitsAndBytesConfig]:
    """How weights are packed into 4 or 8 bits as they are read; None where they are not, or lie packed in the files."""
    if settings.tuning != "qlora":
        return None
    config = _config_of(name, settings)
    skeleton = skeleton_of(config, settings.trust_remote_code)
    return quantization_config(settings, skeleton, compute_dtype_of(settings, device))


def _config_of(name: str, settings: ModelSettings) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(
        located(name), revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
    )


def _bytes_per_weight(config: PretrainedConfig, dtype: Any, settings: ModelSettings) -> float:
    """Of a weight in memory, at least."""
    import torch

    if settings.tuning == "qlora" or getattr(config, "quantization_config", None):
        return 0.5
    stored = dtype if isinstance(dtype, torch.dtype) else config.dtype
    return float(stored.itemsize) if isinstance(stored, torch.dtype) else 2.0


def plan_placement(
    settings: ModelSettings, memory: MemorySettings, free: Free, *, device: torch.device
) -> Optional[Placement]:
    """Where ``device_map`` puts the weights, known before any is loaded; None without it. Raises a UserError where they
    do not fit or could not be trained there."""
    if settings.device_map is None:
        return None
    check_source(settings.model_name_or_path)
    name = base_of(Path(located(settings.model_name_or_path)))
    with as_model_error(name, "model", settings.model_revision, settings.model_name_or_path):
        announce_code(located(name), settings)
        there = replace(settings, model_name_or_path=located(name))
        return place(there, memory, free, _packing(name, settings, device))


def _require_complete(name: str, report: dict) -> None:
    """Raise ModelError for weights that the files do not hold: transformers fills them with random numbers."""
    random = sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])})
    if random:
        more = f" and {len(random) - 1} more" if len(random) > 1 else ""
        raise ModelError(
            f"the weights of {name!r} are not those of the causal language model in its config.json: {random[0]}{more} "
            "missing or of another shape; give the folder of a complete causal language model"
        )


STUMBLES = (AttributeError, IndexError, ArithmeticError, AssertionError, TypeError, KeyError)
"""What a library runs into that computes with files nobody has looked at: zero heads, text for a number."""


class as_model_error:
    """Context manager: what transformers raises for a name it cannot use becomes one ModelError. ``asked_for``: what a
    person named; where it is an adapter, ``name`` is its base."""

    def __init__(self, name: str, what: str, revision: Optional[str] = None, asked_for: Optional[str] = None) -> None:
        self.name, self.what, self.revision, self.asked_for = name, what, revision, asked_for

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> bool:
        if not _is_of_the_files(error) or _is_out_of_memory(error):
            return False
        if needs_code(error):
            raise code_refusal(located(self.name), self.revision) from error
        first, hint = _first_line(error), ""
        if _is_torn(error):
            hint = f"; {_torn_file(self.name)} is damaged or cut off: copy or download it again"
        elif not Path(self.name).expanduser().exists():
            hint = f"; {_not_here(self.name)}; if it is a Hub id, check its spelling and the connection"
            adapter = Path(self.asked_for or "").expanduser()
            if is_adapter(adapter):
                hint += f"; {adapter / 'adapter_config.json'} names it: set its base_model_name_or_path to where it is"
        first = first.rstrip(".") if hint else first
        raise ModelError(f"cannot load the {self.what} of {self.name!r}: {first}{hint}") from error


def _is_of_the_files(error: Optional[BaseException]) -> bool:
    # The tokenizers library, which is no Python, raises nothing more narrow than Exception itself.
    return not isinstance(error, UserError) and (isinstance(error, _loading_errors()) or type(error) is Exception)


def _not_here(name: str) -> str:
    """That no folder has this name, with the nearest of those beside it."""
    path = Path(name)
    beside = [str(other) for other in path.parent.glob("*") if other.is_dir()] if path.parent.name else []
    return f"there is no folder {name} here{nearest(str(path), beside)}"


def _is_torn(error: Exception) -> bool:
    from safetensors import SafetensorError

    return isinstance(error, SafetensorError)


def _torn_file(name: str) -> str:
    """The first weights file of a folder that cannot be opened."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(name).expanduser().glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return str(file)
    return "its weights file"


def _first_line(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):
        return f"its pickle file is damaged or holds more than tensors, and was not read ({reason_of(error)})"
    first = str(error).strip().splitlines()[0].strip() if str(error).strip() else type(error).__name__
    if first.endswith(":"):  # a list follows
        first = " ".join(str(error).split())[:300]
    if isinstance(error, STUMBLES):
        return f"its files do not hold what the library expects there ({type(error).__name__}: {first})"
    return first


def _loading_errors() -> tuple[type[Exception], ...]:
    """What the libraries raise for files that are torn, of another kind, or in need of a package."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    builtin = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, UserWarning, pickle.UnpicklingError)
    return (*builtin, *STUMBLES, StrictDataclassError, SafetensorError)


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def prepare_for_tuning(model: PreTrainedModel, settings: ModelSettings, adapters: AdapterPlan = CAUSAL) -> nn.Module:
    """Full: every weight trainable. LoRA: adapters on ``lora_target_modules`` or on those of the plan, base frozen;
    where ``model_name_or_path`` is an adapter, training goes on with it, and its own configuration counts."""
    adapter = Path(settings.model_name_or_path or "").expanduser()
    if settings.tuning == "full":
        if is_adapter(adapter):
            raise ModelError(
                f"tuning: full cannot start from the adapter {adapter}; give its base model, or use tuning: lora"
            )
        return choose_weights(model, settings)
    if is_adapter(adapter):
        grow_embeddings(model, rows_of_adapter(adapter))
        if has_offloaded_weights(model):
            require_safe_adapter(adapter, settings.allow_pickle)
            with as_model_error(str(adapter), "adapter"):
                return adapt_as_saved(model, adapter)
        adapted = with_adapter(model, adapter, is_trainable=True, allow_pickle=settings.allow_pickle)
        return save_rows_alone(adapted) if rows_of_adapter(adapter) else adapted
    config = adapter_config(model, settings, adapters)
    with warnings.catch_warnings():
        # peft finds out layer by layer which way round a weight lies, and warns each time that it did.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        adapted = adapt(model, config)
    return save_rows_alone(adapted) if adapters.new_rows else adapted


def load_for_evaluation(path_or_id: str, settings: ModelSettings) -> PreTrainedModel:
    """A base model, or a base with the adapter found in ``path_or_id``, frozen and in evaluation mode."""
    import torch

    path = Path(path_or_id).expanduser()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(replace(settings, model_name_or_path=path_or_id), device=device)
    if is_adapter(path):
        grow_embeddings(model, rows_of_adapter(path))
        model = with_adapter(model, path, is_trainable=False, allow_pickle=settings.allow_pickle)
    model = model.eval().requires_grad_(False)
    return model if settings.tuning == "qlora" else model.to(device)  # 8-bit weights cannot be moved


def with_adapter(model: PreTrainedModel, adapter: Path, is_trainable: bool, allow_pickle: bool) -> nn.Module:
    from peft import PeftModel

    require_safe_adapter(adapter, allow_pickle)
    with as_model_error(str(adapter), "adapter"), warnings.catch_warnings():
        # An adapter that lacks weights would otherwise pass for its base, with a warning only.
        warnings.filterwarnings("error", "Found missing adapter keys")
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=is_trainable)
