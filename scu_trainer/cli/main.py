"""``scu-trainer COMMAND ...``: finds the command and runs it. Only the command itself imports heavy modules."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Optional
from urllib.parse import urlsplit

from scu_trainer import __version__
from scu_trainer.errors import UserError, did_you_mean
from scu_trainer.imports import claim_process
from scu_trainer.secrets import hide_in_tracebacks, redact, remember_environment

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

INTERRUPTED = 130
"""Exit code of a program ended by Ctrl-C, as in a shell."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that configure torch's allocator: the current one, and two older ones that still work."""

PATH_ERRORS = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT}
"""Error numbers that the user can fix, wherever they are raised."""

COMMANDS = {
    "train": "train a model, with memory kept in check and S measured or steered",
    "recipes": "jobs and launch files that come with the package: list them, print one, copy one",
    "launch": "train under accelerate, deepspeed or torchrun, as fits this machine",
    "variants": "run each memory-efficient path for a few steps and show what it costs; --limit finds one that fits",
    "import": "convert a configuration of TRL, LLaMA-Factory, Axolotl or Unsloth, with every key accounted for",
    "hardware": "this machine: profile, check, monitor, optimize",
    "plan": "predict how much memory a job needs, and find the fastest settings that fit",
    "data": "show what a model learns from a dataset: format, columns, lengths, repetitions, rows with the learned "
    "tokens marked",
    "modes": "estimate how long a job takes in sizes tiny, standard and extended, from a few measured steps",
    "runs": "train in the background: start, list, status, monitor, logs, stop, resume; without an action: a menu",
    "board": "runs in a browser: list, curves, notices; start, stop, resume; two models side by side",
    "eval": "held-out bits per token of a run, an adapter or a base model, with a confidence interval",
    "compare": "compare controllers at equal tokens, over several seeds: a table and a verdict",
    "sweep": "a small search with Optuna, such as learning rate and rank; resumable, with a verdict at the end",
    "report": "runs or a comparison as plots and one HTML page; --watch while they run",
    "chat": "talk to a run, an adapter or a model in the terminal, alone or next to its base",
    "generate": "answers to a file of prompts as JSON lines, in batches that fit, resumable",
    "serve": "serve a run, an adapter or a model over OpenAI's HTTP interface, for this machine or with a key",
    "merge": "merge the adapter of a run into its base: full weights for stock transformers, checked against "
    "the adapter",
    "export": "export a run for other programs: safetensors, gguf, ollama, onnx; read back there and compared",
    "retain": "keep as much of what was learned as a budget on other text allows, measured",
    "prune": "make a trained model smaller: cut out the least used neurons, heads or channels, and measure the cost",
    "push": "push a run to the Hub, as an adapter or merged, with a model card; --dry_run shows every file and byte",
}

MODULES = {
    "import": "names.command",
    "board": "looking.board",
    "data": "looking.data",
    "hardware": "machine.hardware",
    "plan": "planning.plan",
    "chat": "talking.chat",
    "generate": "talking.generate",
    "serve": "talking.serve",
    "runs": "background.runs",
    "eval": "evaluation.eval",
    "retain": "evaluation.retain",
    "compare": "comparison.compare",
    "sweep": "comparison.sweep",
    "report": "publishing.report",
    "merge": "publishing.merge",
    "export": "publishing.export",
    "prune": "publishing.prune",
    "push": "publishing.push",
}
"""Module of a command, relative to ``scu_trainer.cli``. All other modules are named like their command."""


NO_DOCSTRINGS = (
    "(python -OO, or PYTHONOPTIMIZE=2, drops docstrings, and without them transformers does not load; use -O, or "
    "leave it out)"
)


@contextlib.contextmanager
def preserved_environment() -> Iterator[None]:
    """Restore the environment variables on exit, so that what one command sets does not affect the next."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def guarded(command: Callable[..., int]) -> Callable[..., int]:
    """Decorate a command, which takes a list of words (default: those of this process). An error that the user can fix
    becomes one message on stderr and exit code 2."""

    @functools.wraps(command)
    @preserved_environment()
    def main(argv: Optional[Sequence[str]] = None, *args: Any, **kwargs: Any) -> int:
        if argv is None:
            claim_process()
        remember_environment()
        hide_in_tracebacks()
        _let_segments_grow(os.environ)
        _open_closed_streams()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold invalid text
        code = 0
        try:
            _require_address(os.environ.get("HF_ENDPOINT"))
            code = command(list(sys.argv[1:] if argv is None else argv), *args, **kwargs)
            _flush()
            return code
        except BrokenPipeError:  # the reader of the pipe, such as head, has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return code
        except OSError as error:
            line = _os_error_message(error)
            if line is None:
                raise
            _say(f"error: {redact(line)}")
            return UserError.exit_code
        except UserError as error:
            _say(f"{error.label}{redact(str(error))}")
            return error.exit_code
        except KeyboardInterrupt:
            _say("interrupted")
            return INTERRUPTED
        except Exception as error:
            if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # pathlib before Python 3.13
                _say(f"error: {redact(str(error))}: this link leads to itself; give another path")
                return UserError.exit_code
            if sys.flags.optimize < 2:
                raise
            _say(f"error: {type(error).__name__}: {redact(str(error))} {NO_DOCSTRINGS}")
            return UserError.exit_code

    return main


def _require_address(endpoint: Optional[str]) -> None:
    """Raise UserError if ``endpoint`` is no web address; libraries fail differently on it, most with a traceback."""
    with contextlib.suppress(ValueError):  # from urlsplit
        parts = urlsplit(endpoint or "")
        if endpoint is None or (parts.scheme in ("http", "https") and parts.hostname and parts.port != 0):
            return
    raise UserError(
        f"HF_ENDPOINT is {endpoint!r}, which is not an address; give one such as https://huggingface.co, or unset it"
    )


def _flush() -> None:
    """Flush stdout now, because nothing reports an error of the flush at exit. Raises BrokenPipeError. A full disk only
    gives a warning, because the work of the command is done."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _say(f"warning: not all output could be written: {error.strerror}")


@guarded
def main(argv: list[str]) -> int:
    if argv[:1] == ["help"]:  # as in git
        argv = [*argv[1:2], "--help"]
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}{did_you_mean(name, COMMANDS)}; commands: {', '.join(COMMANDS)}")
    return importlib.import_module(f"scu_trainer.cli.{MODULES.get(name, name)}").main(argv[1:])


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, as after ``<&-`` and under some schedulers. In this
    order each gets its usual file number; otherwise the next file that is opened would get it, and libraries and child
    processes would print into that file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, errors="backslashreplace")
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _say(text: str) -> None:
    """Print to stderr, if it can still be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def plain_console(**options: Any) -> Console:
    """Return a rich console without markup, which prints brackets in a name as they are."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # ``guarded`` treats it as success; rich would exit with code 1

    return Plain(highlight=False, markup=False, **options)


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and their values, without a frame."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def figures_table(
    titles: Sequence[str],
    rows: Iterable[Iterable[str]],
    left: Sequence[str],
    title: Optional[str] = None,
    framed: bool = True,
    **column: Any,
) -> Table:
    """Return a table of ``rows`` under ``titles``. Columns are aligned to the right, except for the titles in ``left``.
    ``column``: more options of rich's ``add_column``, for all columns."""
    from rich.box import HEAVY_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=HEAVY_HEAD if framed else None, pad_edge=False)
    for name in titles:
        table.add_column(name, justify="left" if name in left else "right", **column)
    for row in rows:
        table.add_row(*row)
    return table


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error, so that a command can print only its result to standard output."""
    with contextlib.redirect_stdout(sys.stderr):
        from scu_trainer.train.run_directory.logs import run_log

        with run_log():
            yield


def _let_segments_grow(environment: MutableMapping[str, str]) -> None:
    """Let CUDA's allocator grow its segments, which fragments memory less when micro-batches change shape, unless the
    user has configured the allocator. Torch reads the variable at its first allocation."""
    if sys.platform == "linux" and not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = "expandable_segments:True"


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _os_error_message(error: OSError) -> Optional[str]:
    """Return a message for an error about a path or a disk, or None for an error that the user cannot fix."""
    name = "" if error.filename is None else str(error.filename).encode(errors="backslashreplace").decode()
    shown = name if len(name) <= 200 else f"{name[:100]}... ({len(name)} letters)"
    if error.errno in DISK_ERRORS:
        target = shown or "a file, or shared memory (/dev/shm),"  # semaphores are made there, without a name
        return f"the disk is full: {target} cannot be written; free some space, and run the command again"
    if error.errno == errno.EFBIG and error.strerror == os.strerror(errno.EFBIG):
        from scu_trainer.run_files import free_space_hint

        return (
            f"{shown or 'a file'} cannot be written ({error.strerror}); {free_space_hint()}, and run the command again"
        )
    if error.errno in PATH_ERRORS and name:
        return f"cannot use {shown}: {error.strerror}; check the path and its permissions, or give another one"
    if error.errno == errno.ENOENT and error.filename is None and not _has_current_folder():
        return "the current folder was removed; change to one that exists (cd), and run the command again"
    return None


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {description}" for name, description in COMMANDS.items()]
    return "\n".join(
        ["usage: scu-trainer COMMAND [--help] ...", "", "fine-tuning under feedback control", "", "commands:", *lines]
    )


if __name__ == "__main__":
    sys.exit(main())
