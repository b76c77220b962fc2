"""Settings of the data: where documents come from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Optional

from scu_trainer.errors import SettingsError
from scu_trainer.settings.base import Allowed, check_fields, field_types_of, option, require
from scu_trainer.settings.mixture import SourceSettings, dataset_label, is_same_dataset, parsed_dataset, parsed_sources
from scu_trainer.settings.stock import MOST_WORKERS

CHAT_TEMPLATES = ("alpaca", "chatml", "gemma", "llama3", "mistral", "phi3", "qwen", "vicuna")
EMBEDDED_DATASETS = ("python_docs", "stdlib_docstrings", "stdlib_source")
ALLOWED = {
    "validation_split_percentage": Allowed(below=100),
    "sample_max_new_tokens": Allowed(least=1),
    "max_eval_documents": Allowed(least=1),
    "dataset_size": Allowed(least=1),
    "block_size": Allowed(least=8),
    "preprocessing_num_workers": Allowed(least=1, most=MOST_WORKERS),
}


@dataclass(frozen=True)
class DataSettings:
    """Where documents come from and how they become rows of tokens."""

    dataset: str = option(
        "stdlib_docstrings",
        "embedded name (python_docs, stdlib_docstrings, stdlib_source), a .txt, .jsonl, .json, .csv, .tsv, .parquet or "
        ".arrow file, a folder of such files or of `datasets.save_to_disk`, a Hub id, or a list of these (a mixture)",
    )
    dataset_config_name: Optional[str] = option(None, "configuration of a Hub dataset")
    dataset_split: str = option("train", "split to train on")
    eval_dataset: Optional[str] = option(
        None, "a separate held-out dataset, same kinds as dataset; default: a split of dataset"
    )
    validation_split_percentage: float = option(5.0, "percentage of documents held out if eval_dataset is not given")
    sample_prompts: int = option(
        3,
        "number of held-out prompts that the model answers before training, at each evaluation and after training; "
        "0: none",
    )
    sample_max_new_tokens: int = option(48, "largest number of tokens of each answer to sample_prompts")
    max_eval_documents: Optional[int] = option(None, "largest number of held-out documents")
    streaming: bool = option(False, "read a Hub dataset or large files during training; needs max_steps")
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = option(
        "first_exhausted",
        "when an epoch of a weighted mixture ends: before any row is repeated (first_exhausted), or after every row "
        "was used (all_exhausted)",
    )
    text_column: str = option("text", "column with plain text")
    prompt_column: Optional[str] = option(None, "column with the question; default: instruction, question, prompt, ...")
    response_column: Optional[str] = option(None, "column with the answer; default: output, response, answer, ...")
    system_column: Optional[str] = option(None, "column with the system message; default: system, system_prompt")
    messages_column: Optional[str] = option(None, "column with a conversation; default: messages, conversations")
    dataset_size: Optional[int] = option(None, "largest number of documents to use, applied before the split")
    block_size: int = option(512, "tokens per training row")
    packing: bool = option(True, "fill each row with several documents, one after another")
    isolate_documents: Optional[bool] = option(
        None,
        "prevent packed documents from attending to each other; default: yes if the model supports it, otherwise no "
        "packing; false: pack in any case",
    )
    completion_only_loss: bool = option(True, "prompt/completion rows: train only on the tokens of the completion")
    assistant_only_loss: bool = option(True, "chat rows: train only on the tokens of the assistant")
    chat_template: Optional[str] = option(
        None,
        f"chat template: {', '.join(CHAT_TEMPLATES)}, or a Jinja file; default: the tokenizer's own",
    )
    skip_bad_rows: bool = option(False, "count and skip unreadable rows instead of stopping at the first one")
    preprocessing_num_workers: int = option(1, "number of processes that tokenize")
    cache_dir: Optional[str] = option(None, "folder for tokenized data and the embedded base model")

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", parsed_dataset(self.dataset))
        check_fields(self, ALLOWED)
        require(self.dataset not in ("", None), "dataset is empty; give an embedded name, a path or a Hub id")
        named = [name for name in ("prompt_column", "response_column") if getattr(self, name) is not None]
        require(
            self.messages_column is None or not named,
            f"messages_column and {' and '.join(named)} are two ways to name the columns with the content; keep one of "
            f"them",
        )
        require(
            self.packing or not self.isolate_documents,
            "isolate_documents has an effect only with packing; set packing: true or drop it",
        )
        self._check_sources()

    def _check_sources(self) -> None:
        is_weighted = any(source.weight is not None for source in self.sources)
        require(
            is_weighted or self.stopping_strategy == "first_exhausted",
            f"stopping_strategy {self.stopping_strategy} has an effect only on a dataset that is a list with weights; "
            "give its entries weights, or drop it",
        )
        for number, source in enumerate(self.sources, start=1):
            try:
                self.settings_of_source(source)
            except SettingsError as error:
                raise SettingsError(f"entry {number} of dataset ({source.name}): {error}") from error

    @property
    def is_mixture(self) -> bool:
        """Whether ``dataset`` is a list."""
        return isinstance(self.dataset, list)

    @property
    def shown_dataset(self) -> str:
        """``dataset`` for a message: one name, or the names of all sources."""
        return dataset_label(self.dataset)

    @property
    def sources(self) -> tuple[SourceSettings, ...]:
        """The entries of ``dataset`` if it is a list, else empty."""
        return parsed_sources(self.dataset, field_types_of(type(self))) if isinstance(self.dataset, list) else ()

    def index_of_source(self, name: str) -> Optional[int]:
        """Return the index of the source with this name or dataset; None if there is none. Raises SettingsError if
        several sources have this dataset."""
        sources = self.sources
        named = [place for place, source in enumerate(sources) if source.name == name]
        found = named or [place for place, source in enumerate(sources) if is_same_dataset(source.dataset, name)]
        require(
            len(found) < 2,
            f"{name} is the dataset of several sources; name one: {', '.join(sources[at].name for at in found)}",
        )
        return found[0] if found else None

    def settings_of_source(self, source: SourceSettings) -> DataSettings:
        """Return these settings for a single source; the values of its entry override the common ones."""
        return replace(self, dataset=source.dataset, stopping_strategy="first_exhausted", **source.own)
