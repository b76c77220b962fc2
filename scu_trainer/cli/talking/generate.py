"""``scu-trainer generate``: answers a file of prompts, as JSON lines; resumable."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scu_trainer.cli.main import guarded, stdout_to_stderr
from scu_trainer.cli.parsing import Parser
from scu_trainer.cli.talking.options import add_options, answer_settings, subject_from_options, talker
from scu_trainer.errors import DataError, SettingsError, StorageError
from scu_trainer.figures import count_text
from scu_trainer.run_files import read_object, require_writable, write_json

if TYPE_CHECKING:
    from scu_trainer.cli.subjects import Subject
    from scu_trainer.talk.prompts import PromptRow

MAX_NEW_TOKENS, BATCH_ROWS = 256, 8
DESCRIPTION = """\
Answers each prompt of FILE and writes a JSON line for it, in the order of FILE. If it is killed, run the same command
again: it continues after the last complete line. Rows have a column messages, prompt, instruction, question or text; a
.txt file has one prompt per line."""


def _parser() -> Parser:
    parser = Parser(prog="scu-trainer generate", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="a run, a checkpoint, an adapter, a model, or a Hub id")
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="JSON lines, JSON, CSV, Parquet, text"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: answers.jsonl in this folder",
                        default=Path("answers.jsonl"))  # fmt: skip
    parser.add_argument("--batch_size", type=int, default=BATCH_ROWS, metavar="N",
                        help=f"prompts at a time, at most ({BATCH_ROWS}); fewer if memory is short")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="start over if the output already exists")
    add_options(parser, MAX_NEW_TOKENS)
    parser.set_defaults(max_new_tokens=None)  # the default is lowered for a model with few positions
    return parser


@guarded
def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.batch_size < 1:
        raise SettingsError(f"batch_size is {options.batch_size}; it must be 1 or more")
    if options.output.resolve() == options.prompts.resolve():
        raise SettingsError(f"--output is the file of the prompts, {options.prompts}; give another --output")
    require_writable(options.output.parent, "--output")
    subject, is_default = subject_from_options(options.run, options), options.max_new_tokens is None
    options.max_new_tokens = MAX_NEW_TOKENS if is_default else options.max_new_tokens
    with stdout_to_stderr():
        from scu_trainer.talk.answers import BatchedAnswers
        from scu_trainer.talk.prompts import read_prompts

        settings, rows = answer_settings(options), read_prompts(options.prompts)
        request = _request_of(subject, rows, settings) | ({"max_new_tokens": None} if is_default else {})
        written = AnswersFile(options.output, request, options.overwrite)
        done = written.begin()
        for line in written.lines:
            print(line)
        model = talker(subject) if done < len(rows) else None
        if model is not None:
            settings = _with_fitting_length(settings, model) if is_default else settings
            batches = BatchedAnswers(model, settings, options.batch_size)
            dropped = _write_all(written, model, batches, rows[done:], done)
            print("\n".join(_remarks(batches, dropped)), end="")
    print(f"{count_text(len(rows), 'answer')} in {options.output}" + (f", {done} of them from before" if done else ""))
    return 0


def _with_fitting_length(settings: Any, model: Any) -> Any:
    """Limit answers to a quarter of the model's positions, which ``fit_to_positions`` reserves for an answer, too."""
    quarter = settings.max_new_tokens if model.positions is None else max(1, model.positions // 4)
    if quarter < settings.max_new_tokens:
        print(
            f"answers have up to {quarter} tokens, a quarter of the {model.positions} positions of {model.name} "
            "(--max_new_tokens sets another number)"
        )
    return replace(settings, max_new_tokens=min(quarter, settings.max_new_tokens))


def _write_all(written: AnswersFile, model: Any, batches: Any, rows: Sequence[PromptRow], first: int) -> int:
    """Answer all rows and return the number of messages that did not fit. Each batch is written once it is answered, so
    a kill loses at most one batch. All prompts are tokenized in advance, so that one that is too long is found before
    the first answer; their tokens are not kept, because they would take more memory than the text."""
    max_new_tokens = batches.settings.max_new_tokens
    dropped = sum(_trimmed(model, row, max_new_tokens)[1] for row in rows)
    for begin in range(0, len(rows), batches.batch_rows):
        batch = rows[begin : begin + batches.batch_rows]
        answers = batches.answers([_trimmed(model, row, max_new_tokens)[0] for row in batch])
        for number, (row, answer) in enumerate(zip(batch, answers, strict=True), start=first + begin):
            written.add({"index": number, "messages": row.messages, "answer": answer.text, "tokens": answer.tokens,
                         "finish_reason": answer.finish_reason})  # fmt: skip
    return dropped


def _trimmed(model: Any, row: PromptRow, max_new_tokens: int) -> tuple[list[int], int]:
    try:
        return model.trimmed(row.messages, max_new_tokens)
    except DataError as error:
        raise DataError(f"{row.place}: {error}") from error


def _remarks(batches: Any, dropped: int) -> list[str]:
    lines = []
    if batches.out_of_memory:
        lines.append(f"ran out of memory {batches.out_of_memory} times and continued with fewer prompts at a time\n")
    if dropped:
        lines.append(f"{dropped} messages of long conversations did not fit and were left out, the oldest first\n")
    return lines


def _request_of(subject: Subject, rows: Sequence[PromptRow], settings: Any) -> dict[str, Any]:
    """Return everything that the answers depend on."""
    prompts = hashlib.sha256(json.dumps([row.messages for row in rows]).encode()).hexdigest()
    return {"model": subject.source, "files": _weights_stamp(Path(subject.source)), "prompts": prompts,
            "rows": len(rows), "dtype": subject.model.dtype, **asdict(settings)}  # fmt: skip


def _weights_stamp(folder: Path) -> dict[str, list[int]]:
    """Return size and modification time of the weight files, which change if the model is trained further."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


class AnswersFile:
    """The file of answers, and next to it a ``.meta.json`` with what the answers depend on."""

    def __init__(self, path: Path, request: dict[str, Any], overwrite: bool) -> None:
        self.path, self.request, self.overwrite = path, request, overwrite
        self.meta = path.with_name(path.name + ".meta.json")
        self.lines: list[str] = []
        self.is_new = overwrite or not path.exists()

    def begin(self) -> int:
        """Return the number of existing answers. Raises SettingsError if they answer something else."""
        if self.path.is_dir():
            raise SettingsError(f"{self.path} is a folder; give another --output")
        if self.is_new:
            return 0
        stored = read_object(self.meta) if self.meta.is_file() else None
        current = json.loads(json.dumps(self.request))
        if stored != current:
            changed = (
                "it was not written by this command" if stored is None else f"{_changes(stored, current)} changed since"
            )
            raise SettingsError(f"{self.path} already exists, and {changed}; give another --output, or --overwrite")
        return self._whole_lines()

    def _whole_lines(self) -> int:
        """Return the number of complete lines, after cutting off a last line that a kill left incomplete.
        Raises SettingsError for a line that is not the answer of its row."""
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):
            self.lines.append(f"{self.path}: the last line is incomplete and is answered again")
            with open(self.path, "r+b") as file:
                file.truncate(len(complete))
        count = complete.count(b"\n")
        for number, line in enumerate(complete.split(b"\n")[:-1]):
            if number >= self.request["rows"] or not _is_answer(line, number):
                raise SettingsError(
                    f"{self.path} line {number + 1} is not the answer to prompt {number + 1} of "
                    f"{self.request['rows']}; give another --output, or --overwrite"
                )
        if count:
            self.lines.append(f"{self.path}: continuing after {count} answers")
        return count

    def add(self, row: dict[str, Any]) -> None:
        if self.is_new:  # only with the first answer, so that a command that fails keeps the old file
            if self.path.exists() and not self.overwrite:
                raise SettingsError(f"{self.path} was written by another command meanwhile; give another --output")
            self.path.unlink(missing_ok=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.meta, self.request)
            self.is_new = False
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path}: {error.strerror}; run the same command to continue"
            ) from error


def _is_answer(line: bytes, number: int) -> bool:
    """Whether a line of the file is what ``AnswersFile.add`` wrote for this row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.get("index") == number and isinstance(row.get("answer"), str)


def _changes(stored: dict[str, Any], current: dict[str, Any]) -> str:
    return ", ".join(name for name in current if stored.get(name) != current[name]) or "something"
