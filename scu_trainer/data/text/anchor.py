"""Text that must not be forgotten, parted by documents: measured while training, replayed, and unseen until the end."""

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
from scu_trainer.data.text.prepare import plan_of, sides_of, tokenized
from scu_trainer.errors import DataError
from scu_trainer.settings import DataSettings
from scu_trainer.settings.regularization import FEWEST_TO_RETAIN

if TYPE_CHECKING:
    import datasets

SHARE_PER_JUDGE = 0.2
"""Of the documents: for measuring, and as many for the verdict. The rest may be trained on."""

MOST_PER_JUDGE = 200
"""Documents that are measured, or give the verdict: more would cost time and tell little."""

MOST_ROWS_PER_JUDGE = 1000
"""Of their rows, so many of each document as there is room for."""


@dataclass(frozen=True)
class Anchor:
    """Rows of the text that must not be forgotten. No document is in two parts, and copies are in one.

    replayed: as training rows, None where they are not trained on. measured, unseen: as held-out rows. ``documents``:
    how many each part has, and how many were left out because they are in the training data. ``fingerprint``: of text,
    settings, tokenizer and parting together. ``reason``: why ``replayed`` is what it is, for a person. ``place``: among
    the sources of the data, None of another text.
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
    """``settings``: those of the training data, whose rules for rows hold here too. ``name``: a source of them if they
    are a mixture and it has that name or dataset, else another text. ``choose``: whether so many rows are enough to
    train on, and why; where they are not, documents of another text are measured as well.

    Raises DataError for a text that cannot be found or read, or has too few documents.
    """
    of_model = (tokenizer, seed, cache_dir, model_name)
    place = settings.place_of_source(name)
    if place is None:
        found = _of_another_text(settings, name, most_documents, of_model)
    else:
        found = _of_source(settings, place, most_documents, of_model)
    parts, statistics = found.parts, DataStatistics()

    def held_out(which: str) -> datasets.Dataset:
        documents = found.judges.numbered(parts[which])
        rows = in_memory(held_out_rows(documents, found.settings, statistics), held_out_schema())
        few = spread(numpy.asarray(rows["document"]))[:MOST_ROWS_PER_JUDGE]
        return rows if len(few) == len(rows) else rows.select(numpy.sort(few))

    schema = training_schema(bool(settings.isolate_documents))
    replayed = in_memory(training_rows(found.trained.numbered(parts["replayed"]), found.settings, statistics), schema)
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
        {**{part: len(numbers) for part, numbers in parts.items()}, "in_the_data": found.in_the_data},
        digest_of(found.fingerprint, MOST_ROWS_PER_JUDGE, {part: numbers.tolist() for part, numbers in parts.items()}),
        reason,
        place,
    )


class _Found(NamedTuple):
    """``judges``: documents of which some are measured and others give the verdict. ``trained``: of which some may be
    replayed. ``parts``: their numbers, by part. ``in_the_data``: judges that are left out because they are learned."""

    settings: DataSettings
    fingerprint: str
    judges: TokenizedDocuments
    trained: TokenizedDocuments
    parts: dict[str, numpy.ndarray]
    in_the_data: int


def _of_another_text(settings: DataSettings, name: str, most_documents: int, of_model: tuple) -> _Found:
    """All of it is parted; what is in the data as well, held-out documents too, is in no part."""
    known = _digests_of_data(settings, of_model)
    alone = _alone(settings, name, most_documents)
    try:
        plan = plan_of(alone, *of_model)
        documents = tokenized(plan, plan.source, most_documents, DataStatistics())
        parts = parted(documents.digests, plan.seed, f"{name} has", known)
    except DataError as error:
        if not settings.is_mixture:
            raise
        names = ", ".join(source.name for source in settings.sources)
        raise DataError(f"{error}. To keep a source of the data, name it: {names}") from error
    in_data = int(numpy.isin(documents.digests, known).sum())
    return _Found(alone, plan.fingerprint, documents, documents, parts, in_data)


def _of_source(settings: DataSettings, place: int, most_documents: int, of_model: tuple) -> _Found:
    """What it holds out judges; what is trained on may be replayed, which gives it a larger share."""
    mixture = mixture_plan(settings, *of_model)
    plan, name = mixture.plans[place], mixture.names[place]
    sides = [sides_of(each) for each in mixture.plans]
    known = numpy.concatenate([documents.digests[order] for documents, order, _, _ in sides])
    trained, train_order, judges, order = sides[place]
    digests = judges.digests[order]
    advice = (
        "hold out more (validation_split_percentage, max_eval_documents, a larger split of its own), or give a text "
        "that is not trained on"
    )
    parts = parted(digests, plan.seed, f"{name} holds out", known, 0.5, advice)
    numbers = {part: order[parts[part]] for part in ("unseen", "measured")}
    numbers["replayed"] = train_order[:most_documents]
    return _Found(plan.settings, plan.fingerprint, judges, trained, numbers, int(numpy.isin(digests, known).sum()))


def _alone(settings: DataSettings, name: str, most_documents: int) -> DataSettings:
    """The rules of ``settings`` for one text; a file of paragraphs is cut into them, as where some are held out."""
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
    """Of all documents of the data, held-out ones too; none of a stream, which nobody has read yet."""
    if settings.streaming:
        return numpy.empty(0, dtype=numpy.int64)
    plans = mixture_plan(settings, *of_model).all_plans if settings.is_mixture else (plan_of(settings, *of_model),)
    sides = map(sides_of, plans)
    return numpy.concatenate(
        [part for documents, _, held_out, order in sides for part in (documents.digests, held_out.digests[order])]
    )


def parted(
    digests: numpy.ndarray,
    seed: int,
    who_has: str,
    known: numpy.ndarray,
    share: float = SHARE_PER_JUDGE,
    advice: str = "give more, shorter ones for instance (one empty line between two in a .txt file)",
) -> dict[str, numpy.ndarray]:
    """Numbers of the documents of each part, by the seed. ``digests``: equal for copies, of which the first counts.
    ``known``: digests of the data, whose documents are in no part: the verdict would be of what was learned.
    ``share``: of the documents, for measuring and as many for the verdict, MOST_PER_JUDGE each at most.

    Raises DataError where there are fewer than FEWEST_TO_RETAIN different ones: ``who_has`` them, and ``advice``.
    """
    different, numbers = numpy.unique(digests, return_index=True)
    numbers = numbers[~numpy.isin(different, known)]
    if len(numbers) < FEWEST_TO_RETAIN:
        of_data = len(different) - len(numbers)
        also = f" ({of_data} more are in the training data, too)" if of_data else ""
        raise DataError(
            f"retain: {who_has} {len(numbers)} different documents of {len(digests)}{also}, and {FEWEST_TO_RETAIN} "
            f"are needed: {FEWEST_TO_RETAIN // 2} to measure on and {FEWEST_TO_RETAIN // 2} for the verdict; {advice}"
        )
    order = numpy.random.default_rng([seed, len(numbers)]).permutation(numpy.sort(numbers))
    count = min(MOST_PER_JUDGE, max(FEWEST_TO_RETAIN // 2, round(len(numbers) * share)))
    return {"unseen": order[:count], "measured": order[count : 2 * count], "replayed": order[2 * count :]}


def spread(documents: numpy.ndarray) -> numpy.ndarray:
    """Row numbers: the first row of every document, then the second of every one that has it, and so on."""
    order = numpy.argsort(documents, kind="stable")
    _, starts, counts = numpy.unique(documents[order], return_index=True, return_counts=True)
    place = numpy.arange(len(documents)) - numpy.repeat(starts, counts)
    return order[numpy.lexsort((order, place))]
