"""A mixture that creates its rows while training reads them. Every pass gives the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Optional

from scu_trainer.data.statistics import DataStatistics, SourceStatistics, set_shares
from scu_trainer.data.text.encode import NOT_LEARNED
from scu_trainer.data.text.mixture_plan import (
    MixturePlan,
    number_in_mixture,
    prepared_mixture,
    renumbered_in_memory,
    source_statistics,
    statistics_of,
)
from scu_trainer.data.text.packing import training_schema
from scu_trainer.data.text.plan import PreparedData
from scu_trainer.data.text.shares import mix_by_shares
from scu_trainer.data.text.stream import TrainingStream


class MixtureStream:
    """Each call reads all sources from the start: with the given shares, or in sequence if they have no weights.
    ``statistics`` describe the latest pass in this process. If a source is read several times in a pass, its read and
    dropped rows count only the first time; the training rows it yields count each time."""

    def __init__(
        self,
        mixture: MixturePlan,
        streams: Sequence[TrainingStream],
        statistics: DataStatistics,
        held_out: Optional[DataStatistics],
    ) -> None:
        """``held_out``: statistics of the eval_dataset, if there is one."""
        self.mixture, self.streams, self.statistics, self.held_out = mixture, list(streams), statistics, held_out
        self._at_start = statistics.as_dict()

    def __call__(self) -> Iterator[dict]:
        vars(self.statistics).update(DataStatistics(**self._at_start).as_dict())
        for stream in self.streams:
            stream.start_over()
        counts = [SourceStatistics(**source) for source in self._at_start["sources"]]
        for source, row in self._rows(counts):
            self._count(counts, source, row)
            documents = [number_in_mixture(number, source, len(counts)) for number in row["documents"]]
            yield {**row, "documents": documents}

    def _rows(self, counts: list[SourceStatistics]) -> Iterator[tuple[int, dict]]:
        def start(source: int) -> Iterator[dict]:
            counts[source].passes += 1
            stream = self.streams[source]
            if counts[source].passes > 1:
                stream = TrainingStream(stream.plan, stream.skip, DataStatistics(streaming=True))
            return stream()

        if self.mixture.shares is None:
            return ((source, row) for source in range(len(counts)) for row in start(source))
        return mix_by_shares(self.mixture.shares, start, self.mixture.settings.stopping_strategy)

    def _count(self, counts: list[SourceStatistics], source: int, row: dict) -> None:
        learned = int((row["labels"] != NOT_LEARNED).sum())
        counts[source].rows += 1
        counts[source].supervised_tokens += learned
        of_streams = [stream.statistics for stream in self.streams]
        for count, read in zip(counts, source_statistics(self.mixture, of_streams), strict=True):
            count.rows_read, count.rows_dropped, count.documents = read.rows_read, read.rows_dropped, read.documents
        set_shares(counts)
        total = statistics_of(self.mixture, of_streams, self.held_out)
        total.sources, total.notes = [asdict(count) for count in counts], self._at_start["notes"]
        for name, more in (("blocks", 1), ("train_tokens", len(row["labels"])), ("supervised_tokens", learned)):
            setattr(total, name, getattr(self.statistics, name) + more)
        vars(self.statistics).update(vars(total))


def prepare_mixture_stream(
    mixture: MixturePlan, parts: Sequence[PreparedData], held_out: Optional[PreparedData]
) -> PreparedData:
    """``parts``: prepared streams of the sources. ``held_out``: the eval_dataset, prepared, if there is one."""
    import datasets

    of_parts = [part.statistics for part in parts]
    held_out_statistics = None if held_out is None else held_out.statistics
    statistics = statistics_of(mixture, of_parts, held_out_statistics)
    statistics.sources = [asdict(item) for item in source_statistics(mixture, of_parts)]
    if mixture.shares is None:
        statistics.notes.append("streaming without weights: sources are read in sequence; give weights to mix them")
    streams = [part.stream for part in parts]
    features = datasets.Features.from_arrow_schema(training_schema(mixture.settings.isolate_documents))
    stream = MixtureStream(mixture, streams, statistics, held_out_statistics)
    train = datasets.IterableDataset.from_generator(stream, features=features)
    held_out_rows = [
        renumbered_in_memory(part.eval, source, len(parts))
        for source, part in enumerate(parts)
        if part.eval is not None
    ]
    return prepared_mixture(mixture, train, statistics, parts, held_out_rows, held_out)
