"""Create rows while training reads them: nothing is stored, and the first rows are ready immediately.

The *first* documents of the stream are held out, because its end is unknown. If the data are sorted (by date, by
topic), give an ``eval_dataset``. Documents keep the order of the source. Every pass gives the same rows, so a resumed
run can skip those that it has seen. Of ``validation_split_percentage`` it only matters whether it is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from scu_trainer.data.sources import Source
from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.text.documents import usable_documents
from scu_trainer.data.text.encode import Document
from scu_trainer.data.text.packing import (
    NumberedDocument,
    held_out_rows,
    held_out_schema,
    in_memory,
    training_rows,
    training_schema,
)
from scu_trainer.data.text.plan import EncodingPlan, HeldOutDocument, PreparedData
from scu_trainer.errors import DataError

HELD_OUT_DOCUMENTS = 100  # unless max_eval_documents says otherwise


class TrainingStream:
    """Each call reads the source from its start. ``statistics`` describe the latest pass in this process; with
    dataloader workers the counts stay in the workers."""

    def __init__(self, plan: EncodingPlan, skip: int, statistics: DataStatistics) -> None:
        self.plan, self.skip, self.statistics = plan, skip, statistics
        self._at_start = statistics.as_dict()

    def start_over(self) -> None:
        """Reset the counts of an earlier pass."""
        vars(self.statistics).update(DataStatistics(**self._at_start).as_dict())

    def __call__(self) -> Iterator[dict]:
        self.start_over()
        plan = self.plan
        documents = usable_documents(plan.source, plan.encoder, plan.settings.dataset_size, 1, self.statistics)
        yield from training_rows(self._numbered(islice(documents, self.skip, None)), plan.settings, self.statistics)
        if not self.statistics.supervised_tokens:
            raise DataError(
                f"{plan.source.name} has nothing to learn after the {self.skip} held-out documents; dropped: "
                f"{self.statistics.describe_dropped()}"
            )

    def _numbered(self, documents: Iterator[Document]) -> Iterator[NumberedDocument]:
        for number, document in enumerate(documents, start=self.skip):
            self.statistics.documents += 1
            yield NumberedDocument(number, document.input_ids, document.labels)


def prepare_stream(plan: EncodingPlan) -> PreparedData:
    """Return the same as ``prepare_plan``, with an IterableDataset to train on."""
    import datasets

    statistics, first = DataStatistics(streaming=True, notes=[*plan.notes]), DataStatistics()
    held_out = _held_out_documents(plan, statistics, first)
    skip = 0 if plan.held_out else len(held_out)
    if skip:
        statistics.notes.append(f"streaming: the first {skip} documents are held out")
    numbered = (NumberedDocument(n, document.input_ids, document.labels) for n, document in enumerate(held_out))
    rows = in_memory(held_out_rows(numbered, plan.settings, statistics), held_out_schema())
    features = datasets.Features.from_arrow_schema(training_schema(plan.settings.isolate_documents))
    stream = TrainingStream(plan, skip, statistics)
    train = datasets.IterableDataset.from_generator(stream, features=features)
    if not skip and plan.source is not plan.held_out:  # read one document, to report its format before training
        list(usable_documents(plan.source, plan.encoder, 1, 1, first))
    statistics.add(first)  # for display; training resets these counts when it reads the rows again
    return PreparedData(
        train=train,
        eval=rows if len(rows) else None,
        statistics=statistics,
        fingerprint=plan.fingerprint,
        eval_documents=tuple(
            HeldOutDocument(number, document.name, len(document.input_ids), document.utf8_bytes)
            for number, document in enumerate(held_out)
        ),
        stream=stream,
    )


def _held_out_documents(plan: EncodingPlan, statistics: DataStatistics, first: DataStatistics) -> list[Document]:
    """Return the held-out documents. Rows that the training stream will read again are counted in ``first``."""
    limit = plan.settings.max_eval_documents or HELD_OUT_DOCUMENTS
    if plan.held_out:
        documents = _first_documents(plan, plan.held_out, limit, statistics)
    elif plan.settings.validation_split_percentage:
        documents = _first_of_training(plan, limit, first)
    else:
        documents = []
    statistics.eval_documents = len(documents)
    return documents


def _first_of_training(plan: EncodingPlan, limit: int, statistics: DataStatistics) -> list[Document]:
    """Return the first documents of the training stream. Raises DataError if none would be left to train on."""
    documents = _first_documents(plan, plan.source, min(limit + 1, plan.settings.dataset_size or limit + 1), statistics)
    if len(documents) <= limit:
        raise DataError(
            f"{plan.source.name} has {len(documents)} documents and streaming holds out the first {limit}, so none "
            f"is left to train on; lower max_eval_documents below {len(documents)}, or set streaming: false"
        )
    return documents[:limit]


def _first_documents(plan: EncodingPlan, source: Source, limit: int, statistics: DataStatistics) -> list[Document]:
    documents = list(usable_documents(source, plan.encoder, limit, 1, statistics))
    if not documents:
        raise DataError(f"{source.name} has no usable document; dropped: {statistics.describe_dropped()}")
    return documents
