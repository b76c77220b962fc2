"""Split the text to retain by documents: measured during training, replayed, and unseen until the final verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy

from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.store import digest_of
from scu_trainer.data.text.documents import TokenizedDocuments
from scu_trainer.data.text.mixture_plan import mixture_plan
from scu_trainer.data.text.packing import held_out_rows, held_out_schema, in_memory, training_rows, training_schema
from scu_trainer.data.text.prepare import both_sides_uncounted, plan_of, tokenized
from scu_trainer.errors import DataError
from scu_trainer.settings import DataSettings
from scu_trainer.settings.regularization import FEWEST_RETAIN_DOCUMENTS

if TYPE_CHECKING:
    import datasets

SHARE_PER_JUDGE = 0.2
"""Share of the documents for measuring, and again for the verdict. The rest may be trained on."""

MOST_PER_JUDGE = 200
"""Most documents for measuring, and for the verdict. More would cost time and hardly improve the estimate."""

MOST_ROWS_PER_JUDGE = 1000
"""Most rows of these documents, taken evenly from all of them."""


@dataclass(frozen=True)
class Anchor:
    """Rows of the text to retain. No document is in two parts, nor is a copy of it in another part.

    replayed: training rows, or None if the text is not trained on. measured, unseen: held-out rows. ``documents``: the
    number of documents in each part, and ``in_the_data``, the number left out because they are in the data.
    ``fingerprint``: changes with text, settings, tokenizer or split. ``reason``: why the text is replayed or not, for
    the user. ``place``: index among the sources of the data, or None for a separate text.
    """

    name: str
    replayed: Optional[datasets.Dataset]
    measured: datasets.Dataset
    unseen: datasets.Dataset
    documents: dict[str, int]
    fingerprint: str
    reason: str = ""
    place: Optional[int] = None


def read_anchor(
    settings: DataSettings,
    name: str,
    most_documents: int,
    *,
    tokenizer: Any,
    seed: int,
    cache_dir: Path,
    model_name: str,
    choose: Callable[[int], tuple[bool, str]],
) -> Anchor:
    """Read the text to retain and split it.

    ``settings``: those of the training data, whose rules for rows apply here too. ``name``: name or dataset of a source
    of these data if they are a mixture, else a separate text. ``choose``: takes the number of rows to replay, and
    returns whether they are enough to train on, and why. If not, these documents of a separate text are measured too.
    Raises DataError for a text that cannot be found or read, or has too few documents.
    """
    of_model = (tokenizer, seed, cache_dir, model_name)
    place = settings.index_of_source(name)
    if place is None:
        split = _split_separate_text(settings, name, most_documents, of_model)
    else:
        split = _split_source(settings, place, most_documents, of_model)
    parts, statistics = split.parts, DataStatistics()

    def held_out(which: str) -> datasets.Dataset:
        documents = split.judges.numbered(parts[which])
        rows = in_memory(held_out_rows(documents, split.settings, statistics), held_out_schema())
        few = round_robin_rows(numpy.asarray(rows["document"]))[:MOST_ROWS_PER_JUDGE]
        return rows if len(few) == len(rows) else rows.select(numpy.sort(few))

    schema = training_schema(bool(settings.isolate_documents))
    replayed = in_memory(training_rows(split.trained.numbered(parts["replayed"]), split.settings, statistics), schema)
    is_enough, reason = choose(len(replayed))
    if not is_enough:
        spare = parts["replayed"] if place is None else parts["replayed"][:0]
        parts = {**parts, "measured": numpy.concatenate([parts["measured"], spare])[:MOST_PER_JUDGE]}
        parts["replayed"] = parts["replayed"][:0]
    return Anchor(
        name,
        replayed if is_enough else None,
        held_out("measured"),
        held_out("unseen"),
        {**{part: len(numbers) for part, numbers in parts.items()}, "in_the_data": split.in_the_data},
        digest_of(split.fingerprint, MOST_ROWS_PER_JUDGE, {part: numbers.tolist() for part, numbers in parts.items()}),
        reason,
        place,
    )


class _Split(NamedTuple):
    """``judges``: the documents for measuring and for the verdict. ``trained``: the documents that may be replayed.
    ``parts``: document numbers by part. ``in_the_data``: how many judges are left out because training learns them."""

    settings: DataSettings
    fingerprint: str
    judges: TokenizedDocuments
    trained: TokenizedDocuments
    parts: dict[str, numpy.ndarray]
    in_the_data: int


def _split_separate_text(settings: DataSettings, name: str, most_documents: int, of_model: tuple) -> _Split:
    """Split all documents of a separate text, except those that are also in the data, trained on or held out."""
    known = _digests_of_data(settings, of_model)
    text_settings = _settings_for_text(settings, name, most_documents)
    try:
        plan = plan_of(text_settings, *of_model)
        documents = tokenized(plan, plan.source, most_documents, DataStatistics())
        parts = split_documents(documents.digests, plan.seed, f"{name} has", known)
    except DataError as error:
        if not settings.is_mixture:
            raise
        names = ", ".join(source.name for source in settings.sources)
        raise DataError(f"{error}. To retain a source of the data, give its name: {names}") from error
    in_data = int(numpy.isin(documents.digests, known).sum())
    return _Split(text_settings, plan.fingerprint, documents, documents, parts, in_data)


def _split_source(settings: DataSettings, place: int, most_documents: int, of_model: tuple) -> _Split:
    """Split the held-out documents of a source into those for measuring and those for the verdict. Its training
    documents may be replayed, which increases its share."""
    mixture = mixture_plan(settings, *of_model)
    plan, name = mixture.plans[place], mixture.names[place]
    sides = [both_sides_uncounted(each) for each in mixture.plans]
    known = numpy.concatenate([documents.digests[order] for documents, order, _, _ in sides])
    trained, train_order, judges, order = sides[place]
    digests = judges.digests[order]
    advice = (
        "hold out more (validation_split_percentage, max_eval_documents, a larger held-out split), or give a text that "
        "is not trained on"
    )
    parts = split_documents(digests, plan.seed, f"{name} holds out", known, 0.5, advice)
    numbers = {part: order[parts[part]] for part in ("unseen", "measured")}
    numbers["replayed"] = train_order[:most_documents]
    return _Split(plan.settings, plan.fingerprint, judges, trained, numbers, int(numpy.isin(digests, known).sum()))


def _settings_for_text(settings: DataSettings, name: str, most_documents: int) -> DataSettings:
    """Return ``settings`` with the text as the only dataset. The validation percentage makes ``training_source`` cut
    a .txt file of one document into paragraphs."""
    return replace(
        settings,
        dataset=name,
        dataset_config_name=None,
        dataset_split="train",
        dataset_size=most_documents,
        eval_dataset=None,
        validation_split_percentage=50.0,
        streaming=False,
        stopping_strategy="first_exhausted",
    )


def _digests_of_data(settings: DataSettings, of_model: tuple) -> numpy.ndarray:
    """Return the digests of all documents of the data, also held-out ones; none of a stream, which is not read yet."""
    if settings.streaming:
        return numpy.empty(0, dtype=numpy.int64)
    plans = mixture_plan(settings, *of_model).all_plans if settings.is_mixture else (plan_of(settings, *of_model),)
    sides = map(both_sides_uncounted, plans)
    return numpy.concatenate(
        [part for documents, _, held_out, order in sides for part in (documents.digests, held_out.digests[order])]
    )


def split_documents(
    digests: numpy.ndarray,
    seed: int,
    who_has: str,
    known: numpy.ndarray,
    share: float = SHARE_PER_JUDGE,
    advice: str = "give more, shorter ones for instance (one empty line between two in a .txt file)",
) -> dict[str, numpy.ndarray]:
    """Split documents at random, by ``seed``, and return the document numbers of each part.

    ``digests``: equal for copies, of which only the first is used. ``known``: digests of the data; these documents are
    in no part, because the verdict must not be about text that was learned. ``share``: share of the documents for
    measuring, and again for the verdict, at most MOST_PER_JUDGE each. Raises DataError, with a message that begins with
    ``who_has`` and ends with ``advice``, if fewer than FEWEST_RETAIN_DOCUMENTS different documents are left.
    """
    different, numbers = numpy.unique(digests, return_index=True)
    numbers = numbers[~numpy.isin(different, known)]
    if len(numbers) < FEWEST_RETAIN_DOCUMENTS:
        of_data = len(different) - len(numbers)
        also = f" ({of_data} more are also in the training data)" if of_data else ""
        raise DataError(
            f"retain: {who_has} {len(numbers)} different documents of {len(digests)}{also}, but "
            f"{FEWEST_RETAIN_DOCUMENTS} are needed: {FEWEST_RETAIN_DOCUMENTS // 2} to measure on and "
            f"{FEWEST_RETAIN_DOCUMENTS // 2} for the verdict; {advice}"
        )
    order = numpy.random.default_rng([seed, len(numbers)]).permutation(numpy.sort(numbers))
    count = min(MOST_PER_JUDGE, max(FEWEST_RETAIN_DOCUMENTS // 2, round(len(numbers) * share)))
    return {"unseen": order[:count], "measured": order[count : 2 * count], "replayed": order[2 * count :]}


def round_robin_rows(documents: numpy.ndarray) -> numpy.ndarray:
    """Return the row numbers so ordered that the first rows of all documents come first, then the second rows, etc."""
    order = numpy.argsort(documents, kind="stable")
    _, starts, counts = numpy.unique(documents[order], return_index=True, return_counts=True)
    place = numpy.arange(len(documents)) - numpy.repeat(starts, counts)
    return order[numpy.lexsort((order, place))]
