"""``scu-trainer data``: shows what is read from a dataset, and which parts are learned, before anything is trained."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer import __version__
from scu_trainer.cli.fields import parse_with_fields
from scu_trainer.cli.main import guarded, plain_console
from scu_trainer.cli.parsing import Parser, require_new_file
from scu_trainer.errors import DataError, SettingsError, StorageError
from scu_trainer.figures import count_text
from scu_trainer.imports import without_collector
from scu_trainer.settings.stock import effective_data_seed
from scu_trainer.shipped import recipe
from scu_trainer.train.run_directory.logs import run_log

if TYPE_CHECKING:
    from rich.console import Console

    from scu_trainer.cli.looking.facts import DataReport
    from scu_trainer.data.text.encode import Document
    from scu_trainer.settings import DataSettings, ModelSettings

DESCRIPTION = """\
Shows what a job learns from its data: format, columns, lengths, repetitions, strange rows, and some rows with the
learned tokens marked. Flags of `scu-trainer train` are accepted as well. Nothing is trained, no model is loaded."""

SAMPLE = 2000


def _parser() -> argparse.ArgumentParser:
    usage = "%(prog)s [CONFIG] [OPTIONS] [--FIELD VALUE ...]"
    parser = Parser(prog="scu-trainer data", description=DESCRIPTION, usage=usage)
    parser.add_argument(
        "--config", type=recipe, help="YAML or JSON file of the job; it may also be given as the first word"
    )
    parser.add_argument("--rows", type=int, default=3, help="rows to show in full (default 3)")
    parser.add_argument("--sample", default=str(SAMPLE), help=f"documents to check, or all (default {SAMPLE})")
    parser.add_argument("--html", type=Path, help="also write the output as one HTML page")
    parser.add_argument("--export", type=Path, help="write all rows as training reads them, one JSON object per line")
    return parser


@guarded
def main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        argv = ["--config", *argv]
    options, flags = parse_with_fields(_parser(), argv)
    limit = _document_limit(options)
    if options.export is not None:
        require_new_file(options.export, "--export")
    page = options.html
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        raise SettingsError(f"--html {page} is a folder, or its folder does not exist; give the name of a file")
    with without_collector(freeze=True):
        from scu_trainer.cli import configuration

        configuration.check_early(options.config, flags)
        task, model, data = configuration.read_data(options.config, flags)
    if task != "text-generation":
        raise SettingsError(
            f"scu-trainer data checks texts, but this job is {task}; scu-trainer train --preflight_only checks its "
            "samples"
        )
    console = plain_console()
    reports = [
        _print_source(console, options, model, part, limit)
        for part in ([data.settings_of_source(source) for source in data.sources] or [data])
    ]
    with run_log():  # last, because the values that only training knows need torch
        values = configuration.read_values(options.config, flags)
    if page:
        _write_page(page, reports, console)
    if options.export:
        _export(
            options.export,
            model,
            data,
            effective_data_seed(argparse.Namespace(**values)),
            reports[0].tokenizer,
            console,
        )
    return 0


def _document_limit(options: argparse.Namespace) -> Optional[int]:
    if options.sample == "all":
        return None
    if not options.sample.isdecimal() or int(options.sample) < 1:
        raise SettingsError(f"--sample is {options.sample!r}; give a number of documents, 1 or more, or all")
    if options.rows < 0:
        raise SettingsError(f"--rows is {options.rows}; give 0 or more")
    return int(options.sample)


def _print_source(
    console: Console, options: argparse.Namespace, model: ModelSettings, data: DataSettings, limit: Optional[int]
) -> DataReport:
    from scu_trainer.cli.looking import screen
    from scu_trainer.cli.looking.facts import DataReport, facts_of, text_spans
    from scu_trainer.data.statistics import DataStatistics
    from scu_trainer.data.store import default_cache_dir
    from scu_trainer.data.text.documents import usable_documents
    from scu_trainer.data.text.prepare import plan_of

    cache_dir = default_cache_dir(data.cache_dir)
    tokenizer = _load_tokenizer(model, cache_dir)
    plan = plan_of(data, tokenizer, 0, cache_dir, model.model_name_or_path or "the embedded base")
    statistics = DataStatistics(notes=[*plan.notes])
    wanted = min((number for number in (limit, data.dataset_size) if number is not None), default=None)
    documents: list[Document] = []
    shown = []
    name = plan.source.name
    console.print(f"{name} ({screen.legend(console)})", soft_wrap=True, style="bold")
    for document in usable_documents(plan.source, plan.encoder, wanted, 1, statistics):
        documents.append(document)
        if len(shown) < options.rows:
            shown.append((document, text_spans(tokenizer, document)))
            screen.print_row(console, *shown[-1])
    if not documents:
        raise DataError(f"{name} has no document to learn from; dropped: {statistics.describe_dropped()}")
    is_part = wanted is not None and len(documents) == wanted
    article = "the first" if is_part else "all" if len(documents) > 1 else "the"
    sample = f"{article} {count_text(len(documents), 'document')} of {name}"
    texts = tokenizer.batch_decode([document.input_ids for document in documents], skip_special_tokens=True)
    facts = facts_of(documents, texts)
    tokens, learned = int(facts.lengths.sum()), int(facts.learned.sum())
    lines = [
        *statistics.lines_of_reading(),
        f"{count_text(statistics.rows_read, 'row')} read, {count_text(len(documents), 'document')}; {tokens:,} tokens, "
        f"{learned:,} learned ({learned / tokens:.0%})",
    ]
    console.print(f"\n{sample}", style="bold", soft_wrap=True)
    for line in lines:
        console.print(line, soft_wrap=True)
    screen.print_facts(console, facts, data.block_size)
    return DataReport(name, sample, tokenizer, lines, shown, facts, data.block_size)


def _load_tokenizer(model: ModelSettings, cache_dir: Path) -> Any:
    if model.model_name_or_path is None:
        from scu_trainer.data.text.tokenizer import embedded_tokenizer

        return embedded_tokenizer(cache_dir)
    from scu_trainer.models.loading.load import load_tokenizer

    return load_tokenizer(model)


def _write_page(path: Path, reports: Sequence[DataReport], console: Console) -> None:
    from scu_trainer.cli.looking.page import data_page

    written = f"scu-trainer {__version__}, {datetime.now():%Y-%m-%d %H:%M}"
    for number, report in enumerate(reports):
        file = path if number == 0 else path.with_stem(f"{path.stem}-{number + 1}")
        file.write_text(data_page(report, written), encoding="utf-8")
        console.print(f"page: {file}", soft_wrap=True)


def _export(path: Path, model: ModelSettings, data: DataSettings, seed: int, tokenizer: Any, console: Console) -> None:
    from scu_trainer.data import default_cache_dir, prepare
    from scu_trainer.models.embedded import base_config
    from scu_trainer.models.loading.load import causal_config
    from scu_trainer.train.tasks.packing import Packing

    if data.streaming:
        raise SettingsError("--export writes all rows, but a stream has no known end; set streaming: false")
    model_name = model.model_name_or_path
    config = causal_config(model) if model_name else base_config(len(tokenizer), 0, 1, 2)
    packing = Packing.expected(data, config)
    cache_dir = default_cache_dir(data.cache_dir)
    details = {"seed": seed, "cache_dir": cache_dir, "model_name": model_name or "the embedded base"}
    prepared = prepare(packing.applied(data), tokenizer, **details)
    count = _write_rows(path, prepared.train, tokenizer)
    console.print(f"{count_text(count, 'row')} as trained: {path}", soft_wrap=True)


def _write_rows(path: Path, rows: Any, tokenizer: Any) -> int:
    """Write every row with ``input_ids``, ``labels``, ``documents``, ``text``, and ``learned``, the parts of the text
    that are learned. Returns the number of rows. Raises StorageError if the file cannot be written."""
    count = 0
    try:
        with path.open("x", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(_row_entry(row, tokenizer), ensure_ascii=False) + "\n")
                count += 1
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; give --export a path with free space") from error
    return count


def _row_entry(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    from scu_trainer.data.text.encode import NOT_LEARNED

    labels = [int(label) for label in row["labels"]]
    parts = [list(group) for is_learned, group in groupby(labels, NOT_LEARNED.__ne__) if is_learned]
    return {
        "input_ids": [int(token) for token in row["input_ids"]],
        "labels": labels,
        "documents": [int(number) for number in row["documents"]],
        "text": tokenizer.decode(row["input_ids"]),
        "learned": [tokenizer.decode(part) for part in parts],
    }
