"""``scu-trainer chat``: lets you talk to a model in the terminal, alone or next to a second one."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TextIO

from scu_trainer.cli.main import guarded, stdout_to_stderr
from scu_trainer.cli.parsing import Parser
from scu_trainer.cli.talking.options import add_options, answer_settings, subject_from_options, talker
from scu_trainer.data.json_files import TO_UTF_8
from scu_trainer.errors import DataError, SettingsError, UserError, did_you_mean
from scu_trainer.models.loading.adapters import active_config, changes_base_weights
from scu_trainer.run_files import write_text

if TYPE_CHECKING:
    from scu_trainer.talk.answers import AnswerSettings
    from scu_trainer.talk.model import Talker

MAX_NEW_TOKENS = 512
SURROGATE_OFFSET = 0xDC00
"""Offset at which Python's ``surrogateescape`` stores bytes that are not valid text."""

HELP = {
    "/system TEXT": "set the system message and start over; without TEXT, remove it",
    "/reset": "forget the conversation",
    "/save FILE": "save the conversation as JSON lines of messages; with two models, two files",
    "/help": "show these lines",
    "/exit": "end the chat, as Ctrl-D does",
}
HELP_LINES = [f"{name:<14} {text}" for name, text in HELP.items()]
DESCRIPTION = """\
RUN is the folder of a run, of one of its checkpoints, of an adapter or a model, or a Hub id. Answers appear as they
are generated; Ctrl-C stops an answer. If input comes from a pipe, every line is a question, and only the answers are
printed.

  """ + "\n  ".join(HELP_LINES)


def _parser() -> Parser:
    parser = Parser(
        prog="scu-trainer chat", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--against", metavar="OTHER", help="a second model, which answers after it; base: the model "
                        "that it was tuned from")  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", default="", help="system message")
    add_options(parser, MAX_NEW_TOKENS)
    return parser


@guarded
def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    first = subject_from_options(options.run, options)
    other = None if options.against is None else subject_from_options(options.against, options, first)
    with stdout_to_stderr():
        settings = answer_settings(options)
        talkers = [talker(first)]
        if other is not None:
            talkers.append(_load_second(talkers[0], other, is_base=options.against == "base"))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that a line that is not text is refused by its number
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return ChatSession(talkers, settings, options.system, sys.stdin, sys.stdout, is_terminal).run()


def _load_second(first: Talker, other, is_base: bool) -> Talker:
    from scu_trainer.talk.model import base_talker

    if is_base and _contains_its_base(first.model):
        return base_talker(first, other.word or other.name)
    second = talker(other)
    if is_base:
        second.answers_plain_text = first.answers_plain_text  # both get the same prompt
    return second


def _contains_its_base(model: Any) -> bool:
    """Whether ``model`` becomes its base when its adapter is turned off."""
    config = active_config(model)
    return config is not None and not changes_base_weights(config) and getattr(config, "bias", "none") == "none"


class ChatSession:
    """A chat with one model, or with two that get the same questions. Each has its own conversation."""

    def __init__(
        self, talkers: Sequence[Talker], settings: AnswerSettings, system: str, reads: TextIO, writes: TextIO,
        is_terminal: bool,
    ) -> None:  # fmt: skip
        self.talkers, self.settings, self.system = talkers, settings, system
        self.reads, self.writes, self.is_terminal = reads, writes, is_terminal
        self.conversations: list[list[dict[str, str]]] = []
        self._reset()

    def run(self) -> int:
        if self.is_terminal:
            with contextlib.suppress(ImportError):  # not available everywhere; it makes arrow keys work
                import readline  # noqa: F401
        self._say_dimmed("\n".join(self._opening()))
        number = 0
        while (line := self._read()) is not None:
            number += 1
            if not line.strip():
                continue
            try:
                _require_text(line, number)
                if line.startswith("/"):
                    if not self._command(line.strip()):
                        return 0
                    continue
                self._ask(line.strip())
            except UserError as error:
                if not self.is_terminal:
                    raise
                self._say(f"error: {error}\n")
        return 0

    def _opening(self) -> list[str]:
        lines = [f"{' and '.join(speaker.name for speaker in self.talkers)}; {self.settings.in_words(self.talkers[0])}"]
        notes = [note for speaker in self.talkers for note in speaker.notes(speaker.name)]
        return [*lines, *notes, "/help lists commands; Ctrl-D ends"]

    def _read(self) -> Optional[str]:
        try:
            if self.is_terminal:
                return input("\n> ")
            line = self.reads.readline()
            return line if line else None
        except (EOFError, KeyboardInterrupt):
            self._say_dimmed("")
            return None

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, line: str) -> bool:
        """Run a command, and return whether the chat continues."""
        name, _, rest = line[1:].partition(" ")
        actions = {"system": self._set_system, "reset": lambda _: self._reset(), "save": self._save,
                   "help": lambda _: self._say_dimmed("\n".join(HELP_LINES))}  # fmt: skip
        if name in ("exit", "quit"):
            return False
        if name not in actions:
            known = [*actions, "exit"]
            raise SettingsError(f"/{name} is not a command{did_you_mean(name, known)}; commands: /{', /'.join(known)}")
        actions[name](rest.strip())
        return True

    def _set_system(self, text: str) -> None:
        self.system = text
        self._reset()
        self._say_dimmed(f"system message: {text}" if text else "no system message")

    def _reset(self) -> None:
        begin = [{"role": "system", "content": self.system}] if self.system else []
        self.conversations = [list(begin) for _ in self.talkers]

    def _save(self, name: str) -> None:
        if not name:
            raise SettingsError("/save needs a file name")
        path = Path(name).expanduser()
        paths = [path] if len(self.talkers) == 1 else [
            path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, len(self.talkers) + 1)
        ]  # fmt: skip
        for file in paths:
            if file.exists():
                raise SettingsError(f"{file} already exists; give another name")
        for file, conversation in zip(paths, self.conversations, strict=True):
            write_text(file, "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in conversation))
        self._say_dimmed(f"written: {', '.join(map(str, paths))}")

    # -- answers -------------------------------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        for speaker, conversation in zip(self.talkers, self.conversations, strict=True):
            conversation.append({"role": "user", "content": question})
            try:
                answer = self._answer(speaker, conversation)
            except UserError:
                conversation.pop()
                raise
            conversation.append({"role": "assistant", "content": answer})

    def _answer(self, speaker: Talker, conversation: Sequence[dict[str, str]]) -> str:
        from scu_trainer.talk.answers import fit_to_positions, stream

        token_ids, dropped, settings = fit_to_positions(speaker, conversation, self.settings)
        if dropped:
            self._notice(f"[{speaker.name}: the oldest {dropped} messages no longer fit and are left out]")
        if len(self.talkers) > 1:
            self._say(f"[{speaker.name}]\n")
        begun_s, first_s, pieces, counts = time.monotonic(), None, [], []
        written = stream(speaker, token_ids, settings, counts.append)
        is_stopped = False
        try:
            for piece in written:
                first_s = first_s or time.monotonic() - begun_s
                pieces.append(piece)
                self._say(piece)
        except KeyboardInterrupt:
            is_stopped = True
            written.close()
        self._say("\n")
        took_s = time.monotonic() - begun_s
        if is_stopped:
            self._say_dimmed("[stopped]")
        elif counts and first_s is not None:
            self._say_dimmed(
                f"[{counts[0]} tokens, the first after {first_s:.2f} s, {counts[0] / took_s:.1f} per second]"
            )
        return "".join(pieces)

    def _say(self, text: str) -> None:
        self.writes.write(text)
        self.writes.flush()

    def _say_dimmed(self, text: str) -> None:
        """Print dimmed text on a terminal; in a pipe nothing."""
        if self.is_terminal:
            self._say(f"\033[2m{text}\033[0m\n" if text else "\n")

    def _notice(self, text: str) -> None:
        """Print a notice, on standard error if this is not a terminal."""
        print(text, file=self.writes if self.is_terminal else sys.stderr, flush=True)


def _require_text(line: str, number: int) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        byte = ord(line[error.start]) - SURROGATE_OFFSET
        raise DataError(f"line {number} of what was typed is not UTF-8 text (byte 0x{byte:02x}); {TO_UTF_8}") from None
