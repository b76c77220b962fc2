"""Format the values of a report as text, the same way for a monitor, a table and a log line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from scu_trainer.figures import NONE, bits_of, clock_text
from scu_trainer.run_files import format_bytes
from scu_trainer.runs.progress import RunProgress
from scu_trainer.runs.state import Report


def status_words(report: Report) -> str:
    """ "running", "queued (2 ahead)"."""
    return f"{report.state.status} ({report.ahead} ahead)" if report.ahead else report.state.status


def devices(report: Report) -> str:
    return "+".join(report.record.devices) if report.record and report.record.devices else NONE


def steps(progress: RunProgress) -> str:
    if progress.step is None:
        return NONE
    return f"{progress.step}/{progress.max_steps}" if progress.max_steps else str(progress.step)


def number(value: Optional[float], digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def bits(progress: RunProgress) -> str:
    """Return the loss in bits, for a table column with the unit in its title."""
    return number(None if progress.loss is None else bits_of(progress.loss))


def loss(progress: RunProgress) -> str:
    """Return the loss in bits, with its unit. run.json has it in nats, as transformers logs losses."""
    return NONE if progress.loss is None else f"{bits_of(progress.loss):.3f} bits per {progress.unit}"


def s_text(progress: RunProgress) -> str:
    """Return S, and its target if there is one."""
    if progress.s is None:
        return NONE
    return f"{progress.s:.4f}" + ("" if progress.s_target is None else f" of {progress.s_target:.4g}")


def strength(progress: RunProgress) -> str:
    steers = progress.strength or progress.s_target is not None
    return f"{progress.strength:.3g}" if progress.strength is not None and steers else NONE


def memory(report: Report) -> str:
    """Return the memory that the processes hold, and the peak of the last micro-batch with the limit of its device."""
    found, parts = report.progress, []
    if report.resident_bytes is not None:
        parts.append(f"{format_bytes(report.resident_bytes)} held")
    if found.peak_bytes is not None:
        limit = f" of {format_bytes(found.limit_bytes)}" if found.limit_bytes else ""
        parts.append(f"peak of a micro-batch {format_bytes(found.peak_bytes)}{limit}")
    return ", ".join(parts) or NONE


def micro_batch(progress: RunProgress) -> str:
    parts = [(progress.rows_per_chunk, "rows"), (progress.tokens_per_chunk, "tokens")]
    return ", ".join(f"{value} {unit}" for value, unit in parts if value is not None) or NONE


def left(report: Report) -> str:
    """Return the estimated time left, for a run that is alive."""
    return clock_text(report.progress.eta_s) if report.state.is_alive else NONE


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each value that is known."""
    found, record = report.progress, report.record
    yield "status", status_words(report) + (f": {report.state.detail}" if report.state.detail else "")
    if report.pid is not None:
        devices = f", {' and '.join(record.devices)}" if record and record.devices else ""
        nice = f", nice {record.options.nice}" if record else ""
        yield "process", f"{report.pid}{devices}{nice}"
    if record is not None and record.starts > 1:
        yield "starts", str(record.starts)
    for name, value in (
        ("step", steps(found)),
        ("left", left(report)),
        ("loss", loss(found)),
        ("samples per second", number(found.samples_per_second, 1)),
        ("S", s_text(found)),
        ("lambda", strength(found)),
        ("memory", memory(report)),
        ("micro-batch", micro_batch(found)),
        ("checkpoint", found.checkpoint or NONE),
    ):
        if value != NONE:
            yield name, value
    for note in record.notes if record else ():
        yield "note", note


def line(report: Report) -> str:
    """Return the report as one line, for a pipe or a log."""
    found = report.progress
    parts = [
        status_words(report),
        f"step {steps(found)}",
        f"loss {loss(found)}",
        f"samples/s {number(found.samples_per_second, 1)}",
        f"S {s_text(found)}",
        f"lambda {strength(found)}",
        f"memory {memory(report)}",
        f"left {left(report)}",
    ]
    return f"{report.run.name}: " + "  ".join(part for part in parts if not part.endswith(f" {NONE}"))
