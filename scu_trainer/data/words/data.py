"""Prepare texts with categories as training rows and held-out rows of words, with statistics of what was dropped.

    source ─▶ texts (cached) ─▶ split by text ─▶ words and categories of the training texts ─▶ rows (cached)

The vocabulary comes only from the training texts; unknown words and categories of held-out texts are counted. Every row
contains words of one text, because it has one category; long texts continue in more rows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional

import numpy

from scu_trainer.data.sources import Source, held_out_source, notes_of, training_source
from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.store import build_once, digest_of, open_arrow, reading_cache, restored, write_arrow
from scu_trainer.data.text.packing import (
    NumberedDocument,
    held_out_rows,
    held_out_schema,
    record_batches,
    training_rows,
    training_schema,
)
from scu_trainer.data.text.plan import HeldOutDocument, PreparedData
from scu_trainer.data.text.prepare import both_sides
from scu_trainer.data.words.embedded import embedded_sections
from scu_trainer.data.words.texts import TextColumns, Texts, stored_texts
from scu_trainer.data.words.tokenizer import word_tokenizer
from scu_trainer.errors import DataError
from scu_trainer.settings import DataSettings
from scu_trainer.settings.words import EMBEDDED_WORD_DATASET, WordSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS_VERSION = 1  # raise it when the same texts would give other rows
UNKNOWN_CATEGORY = "<unknown>"


@dataclass
class WordStatistics(DataStatistics):
    """``words``, ``eval_words``: words of the texts, without <bos> and <eos>; ``unknown_...``: those that are <unk>.

    without_category: texts without a category. unknown_categories: texts with a category that no training text has, so
    that the model does not know it. Both include held-out texts. ``per_category``: training texts by category.
    """

    vocabulary: int = 0
    words: int = 0
    unknown_words: int = 0
    eval_words: int = 0
    eval_unknown_words: int = 0
    without_category: int = 0
    unknown_categories: int = 0
    per_category: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        lines = [
            *super().lines(),
            f"vocabulary: {self.vocabulary:,} words; <unk>: {_share(self.unknown_words, self.words)} of the training "
            f"words, {_share(self.eval_unknown_words, self.eval_words)} of the held-out ones",
        ]
        if self.per_category:
            most = max(self.per_category, key=self.per_category.get)
            lines.append(f"categories: {len(self.per_category):,}, the largest {most!r} ({self.per_category[most]:,})")
        if self.without_category:
            lines.append(f"{self.without_category:,} texts have no category; they count as {UNKNOWN_CATEGORY}")
        if self.unknown_categories:
            lines.append(
                f"{self.unknown_categories:,} texts have a category that no training text has; they count as "
                f"{UNKNOWN_CATEGORY}"
            )
        return lines


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "none"


@dataclass(frozen=True)
class PreparedWords(PreparedData):
    """PreparedData of rows that also have ``category_ids``, one number per row. ``category_names``: names by number."""

    tokenizer: PreTrainedTokenizerFast
    category_names: tuple[str, ...]


class _Vocabulary(NamedTuple):
    """Known words and categories: those of the training texts, or those of a trained model."""

    tokenizer: PreTrainedTokenizerFast
    category_names: tuple[str, ...]

    @property
    def identity(self) -> list:
        normalizer = json.loads(self.tokenizer.backend_tokenizer.to_str())["normalizer"]
        return [sorted(self.tokenizer.get_vocab().items()), normalizer, self.category_names]


class _Plan(NamedTuple):
    """Everything that decides the rows."""

    settings: DataSettings
    own: WordSettings
    source: Source
    held_out: Optional[Source]
    seed: int
    cache_dir: Path
    known: Optional[_Vocabulary]

    @property
    def columns(self) -> TextColumns:
        return TextColumns(self.settings.text_column, self.own.category_column or None)

    @property
    def folder_name(self) -> str:
        words = [getattr(self.own, name) for name in ("lowercase", "vocabulary_size", "min_word_count")]
        return digest_of(self._texts, self.known.identity if self.known else words)

    def fingerprint(self, known: _Vocabulary) -> str:
        """Of data, settings and vocabulary. It is the same whether this is of a trained model or was built again."""
        return digest_of(self._texts, known.identity)

    @property
    def _texts(self) -> list:
        names = ("block_size", "validation_split_percentage", "max_eval_documents", "dataset_size", "skip_bad_rows")
        rules = {name: getattr(self.settings, name) for name in names}
        held_out = self.held_out.identity if self.held_out else None
        return [WORDS_VERSION, self.source.identity, held_out, self.columns, rules, self.seed]


def prepare_words(
    data: DataSettings,
    own: WordSettings,
    *,
    seed: int,
    cache_dir: Path,
    tokenizer: Optional[PreTrainedTokenizerFast] = None,
    category_names: Sequence[str] = (UNKNOWN_CATEGORY,),
) -> PreparedWords:
    """Return rows of words with the category of their text, from the cache if nothing changed.

    ``tokenizer``, ``category_names``: those of a trained model; without a tokenizer, words and categories are taken
    from the training texts. train: input_ids, labels, length, documents, category_ids. eval: the same, but with
    ``document`` instead of documents. Raises DataError if there is nothing to learn from, StorageError if ``cache_dir``
    cannot be written.
    """
    known = _Vocabulary(tokenizer, tuple(category_names)) if tokenizer is not None else None
    source = _source(data, own, cache_dir)
    held_out = source.held_out
    if data.eval_dataset:
        held_out = _source(replace(data, dataset=data.eval_dataset), own, cache_dir, is_held_out=True)
    data = replace(data, packing=False, isolate_documents=False)
    plan = _Plan(data, own, source, held_out, seed, cache_dir, known)
    folder = build_once(cache_dir / "words" / plan.folder_name, lambda new: _write(new, plan))
    return _open(folder)


def _source(data: DataSettings, own: WordSettings, cache_dir: Path, is_held_out: bool = False) -> Source:
    category = own.category_column or None
    if data.dataset == EMBEDDED_WORD_DATASET:
        return embedded_sections(cache_dir, data.text_column, category)
    read = held_out_source if is_held_out else training_source
    return read(data, cache_dir, columns=(category,) if category else ())


def _open(folder: Path) -> PreparedWords:
    from transformers import PreTrainedTokenizerFast

    with reading_cache(folder):
        described = json.loads((folder / "words.json").read_text())
        documents = tuple(HeldOutDocument(*item) for item in described["eval_documents"])
        return PreparedWords(
            train=open_arrow(folder / "train.arrow"),
            eval=open_arrow(folder / "eval.arrow") if documents else None,
            statistics=restored(WordStatistics, described["books"], "words.json"),
            fingerprint=described["fingerprint"],
            eval_documents=documents,
            tokenizer=PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"),
            category_names=tuple(described["category_names"]),
        )


def _write(folder: Path, plan: _Plan) -> None:
    statistics = WordStatistics(notes=[*notes_of(plan.source, plan.held_out)])
    read = functools.partial(_texts, plan, statistics=statistics)
    texts, train_order, eval_texts, eval_order = both_sides(plan, read, statistics)
    known = plan.known or _build_vocabulary(texts, train_order, plan.own)
    encoder = _Encoder(known, statistics)
    statistics.vocabulary = len(known.tokenizer)
    _write_rows(folder / "train.arrow", encoder, texts, train_order, plan.settings, held_out=False)
    if not statistics.supervised_tokens:
        raise DataError(f"{plan.source.name} has no word to learn; dropped: {statistics.describe_dropped()}")
    documents: list[HeldOutDocument] = []
    if len(eval_order):
        documents = _write_rows(folder / "eval.arrow", encoder, eval_texts, eval_order, plan.settings, held_out=True)
    known.tokenizer.save_pretrained(folder / "tokenizer")
    described = {
        "books": asdict(statistics),
        "fingerprint": plan.fingerprint(known),
        "eval_documents": documents,
        "category_names": known.category_names,
    }
    (folder / "words.json").write_text(json.dumps(described))


def _texts(plan: _Plan, source: Source, limit: int | None, statistics: WordStatistics) -> Texts:
    texts = stored_texts(source, plan.columns, plan.settings.skip_bad_rows, limit, plan.cache_dir)
    statistics.add(texts.statistics)
    return texts


def _build_vocabulary(texts: Texts, order: numpy.ndarray, own: WordSettings) -> _Vocabulary:
    """Return the words and categories of the training texts, the most frequent category first."""
    tokenizer = word_tokenizer(([text.text for _, text in batch] for batch in texts.batches(order)), own)
    counts = texts.category_counts(order)
    names = sorted(counts.keys() - {None, UNKNOWN_CATEGORY}, key=lambda name: (-counts[name], name))
    return _Vocabulary(tokenizer, (UNKNOWN_CATEGORY, *names))


class _Encoder:
    """Turns texts into documents of words, and counts them in ``statistics``."""

    def __init__(self, known: _Vocabulary, statistics: WordStatistics) -> None:
        self.tokenizer, self.statistics = known.tokenizer, statistics
        self.numbers = {name: number for number, name in enumerate(known.category_names)}

    def documents(
        self, texts: Texts, order: numpy.ndarray, category_ids: numpy.ndarray, held_out: bool, described: list
    ) -> Iterator[NumberedDocument]:
        """Yield the documents in the given order. As they are read, ``category_ids`` (texts,), by document number, is
        filled and, if ``held_out``, ``described`` grows."""
        for batch in texts.batches(order):
            encoded = self.tokenizer([text.text for _, text in batch], verbose=False)["input_ids"]
            for (number, text), ids in zip(batch, encoded, strict=True):
                words = numpy.asarray([*ids, self.tokenizer.eos_token_id], dtype=numpy.int32)
                category_ids[number] = self._category_id(text.category, held_out)
                self._count_words(words, held_out)
                if held_out:
                    utf8_bytes = len(text.text.encode("utf-8", "surrogatepass"))
                    described.append(HeldOutDocument(number, text.name, len(words), utf8_bytes))
                yield NumberedDocument(number, words, words.copy())

    def _category_id(self, name: Optional[str], held_out: bool) -> int:
        statistics = self.statistics
        number = self.numbers.get(name or UNKNOWN_CATEGORY, 0)
        statistics.without_category += name is None and len(self.numbers) > 1
        statistics.unknown_categories += name is not None and number == 0
        if name is not None and not held_out:
            statistics.per_category[name] = statistics.per_category.get(name, 0) + 1
        return number

    def _count_words(self, words: numpy.ndarray, held_out: bool) -> None:
        unknown = int((words == self.tokenizer.unk_token_id).sum())
        if held_out:
            self.statistics.eval_words += len(words) - 2
            self.statistics.eval_unknown_words += unknown
        else:
            self.statistics.words += len(words) - 2
            self.statistics.unknown_words += unknown


def _write_rows(
    path: Path, encoder: _Encoder, texts: Texts, order: numpy.ndarray, settings: DataSettings, held_out: bool
) -> list[HeldOutDocument]:
    """Write the rows of one side to ``path``, and return its documents if they are held out."""
    import pyarrow

    described: list[HeldOutDocument] = []
    category_ids = numpy.zeros(len(texts), dtype=numpy.int32)
    documents = encoder.documents(texts, order, category_ids, held_out, described)
    schema = held_out_schema() if held_out else training_schema(isolate=False)
    schema = schema.append(pyarrow.field("category_ids", pyarrow.int32()))
    rows = (held_out_rows if held_out else training_rows)(documents, settings, encoder.statistics)
    numbered = ((row["document"] if held_out else row["documents"][0], row) for row in rows)
    with_category = ({**row, "category_ids": int(category_ids[number])} for number, row in numbered)
    write_arrow(path, schema, record_batches(with_category, schema))
    return described
