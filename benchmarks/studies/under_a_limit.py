"""Under a memory limit that the configured batch does not fit: which contenders finish, when, and with which training?

    python benchmarks/studies/under_a_limit.py [--steps 7] [--shares 0.4 0.2 0.12] [--repeats 2] [--quick]

One training (a small Llama with 32,000 words, lognormal lengths, batch 8 x accumulation 4, AdamW, one epoch with every
row once) runs under a hard limit, RLIMIT_DATA. Allocations above it really fail; nothing is injected. The limit is set
after a first optimizer step on very short rows. From then on a process may use a share (--shares) of what the stock
Trainer needs without a limit. Contenders, each in its own process:

    ours                      SCUTrainer with the default memory loop: micro-batches shrink, the batch stays
    ours, no headroom         the same, without keeping memory free
    stock                     transformers.Trainer as configured
    auto_find_batch_size      the same with the stock option for a lack of memory
    best fixed batch          what a user would find: batch 8, 4, 2, 1 with accumulation 4, 8, 16, 32; the first that
                              finishes. If none does, batch 1 with gradient checkpointing. Each try is a process.
    unlimited                 ours and stock again, without a limit
    Composer                  its automatic micro-batching: a line that says why it is not measured

Time is from the start of ``train()`` to its end. The time of the search is the sum over its tries; a user would also
wait for process starts. Each round runs all contenders, with another one first, and ratios are taken within a round.
Rows count as trained when their gradients reach an optimizer step. Held-out bits per token, and the largest relative
difference of the loss curve from that of stock without a limit (- if the steps differ), show whether the work is equal.
Limit and peak are above the level after the first step, relative to stock without a limit.

Every contender has one thread and no oneDNN, because oneDNN may crash instead of raising an error without memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Optional

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.limit_work import Contender, attempt, composer
from benchmarks.lib.memory_work import MIB, Lengths, Shape
from benchmarks.lib.outcome import Figure, Grid, figure, finish
from benchmarks.lib.text_job import Job
from benchmarks.studies.real_memory import distance
from scu_trainer.settings import MemorySettings

AS_CONFIGURED = Contender("stock")
AUTO_FIND = Contender("auto_find_batch_size", auto_find=True)
OURS = Contender("ours", headroom=MemorySettings.target_headroom_gb)
OURS_FULL = Contender("ours, no headroom", headroom="0%")
REFERENCES = (replace(AS_CONFIGURED, limited=False), replace(OURS, limited=False))
BY_HAND = "best fixed batch"
LAST_RESORT = Contender(BY_HAND, batch_rows=1, checkpointing=True)

JOB = Job(Shape(vocab=32_000, hidden=64, layers=2, longest_row=256), Lengths("short", 60, 0.6), 7, learning_rate=3e-3)
QUICK = Job(
    Shape(vocab=16_384, hidden=16, layers=1, longest_row=48), Lengths("tiny", 16, 0.6), 2, batch_rows=4, accumulation=2
)
SHARES, QUICK_SHARES = (0.4, 0.2, 0.12), (0.85,)
"""Shares of what stock needs: less than its batch of 8, than a batch of 2, and than a single row."""

Result = dict[str, Any]


# -- rounds ------------------------------------------------------------------------------------------------------------


def measured(job: Job, shares: Sequence[float], repeats: int) -> list[Result]:
    """Return all results of all rounds, with their ``round`` and ``share`` (None: unlimited)."""
    first = {"round": 0, "share": None, **attempt(job, REFERENCES[0], None)}
    need_bytes = int(first["peak_over_first_step_mib"] * MIB)
    wanted = [(None, contender) for contender in REFERENCES]
    wanted += [(share, contender) for share in shares for contender in (OURS, OURS_FULL, AUTO_FIND, BY_HAND)]
    results = [first]
    for number in range(repeats):
        turned = wanted[number:] + wanted[:number]
        for share, contender in turned if number else turned[1:]:
            room_bytes = None if share is None else int(share * need_bytes)
            found = (
                [attempt(job, contender, room_bytes)] if isinstance(contender, Contender) else by_hand(job, room_bytes)
            )
            results += [{"round": number, "share": share, "room_bytes": room_bytes, **one} for one in found]
    return [*with_distances(results)]


def by_hand(job: Job, room_bytes: int) -> list[Result]:
    """Return the training as configured, and the best of the search from there. ``search_s``: of all its tries."""
    contenders = [AS_CONFIGURED]
    contenders += [
        Contender(BY_HAND, batch_rows=job.batch_rows >> halvings) for halvings in range(1, job.batch_rows.bit_length())
    ]
    tries: list[Result] = []
    for contender in [*contenders, LAST_RESORT]:
        tries.append(attempt(job, contender, room_bytes))
        if tries[-1]["error"] is None:
            break
    told = [{name: one[name] for name in ("batch_rows", "checkpointing", "error", "wall_s")} for one in tries]
    best = {**tries[-1], "contender": BY_HAND, "tries": told, "search_s": sum(one["wall_s"] for one in tries)}
    return [tries[0], best]


def with_distances(results: Sequence[Result]) -> Iterator[Result]:
    references = {one["round"]: one["losses"] for one in results if is_reference(one, AS_CONFIGURED.name)}
    for one in results:
        yield {**one, "loss_distance": distance(one["losses"], references[one["round"]])}


def is_reference(result: Result, contender: str) -> bool:
    return result["share"] is None and result["contender"] == contender


# -- what it comes to --------------------------------------------------------------------------------------------------


def of(results: Sequence[Result], share: Optional[float], contender: str) -> list[Result]:
    """Return the results of a contender, one per round, in order."""
    return sorted(
        (one for one in results if (one["share"], one["contender"]) == (share, contender)), key=lambda one: one["round"]
    )


def ratios(results: Sequence[Result], share: Optional[float], contender: str, key: str = "wall_s") -> list[float]:
    """Return the seconds of a contender relative to ours, for the rounds that both finished."""
    pairs = zip(of(results, share, contender), of(results, share, OURS.name), strict=True)
    return [one[key] / own["wall_s"] for one, own in pairs if one["error"] is None and own["error"] is None]


def wrong_rows(result: Result) -> int:
    return result["rows_repeated"] + result["rows_never_seen"]


def figures_of(results: Sequence[Result], shares: Sequence[float]) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for share in shares:
        times = {
            "best fixed batch by hand / ours": ratios(results, share, BY_HAND),
            "search by hand included / ours": ratios(results, share, BY_HAND, "search_s"),
            "auto_find_batch_size / ours": ratios(results, share, AUTO_FIND.name),
        }
        limit = limit_of(share)
        found |= {f"{limit}: time to finish, {name}": figure(of_it, "higher") for name, of_it in times.items() if of_it}
        counts = [wrong_rows(one) for one in of(results, share, AUTO_FIND.name) if "rows_repeated" in one]
        if counts:
            found[f"{limit}: rows that auto_find_batch_size repeated or never saw"] = Figure(median(counts), "lower")
    own = [one for share in shares for contender in (OURS, OURS_FULL) for one in of(results, share, contender.name)]
    lost = max(wrong_rows(one) if "rows_repeated" in one else one["rows_due"] for one in own)
    return {**found, "ours: rows repeated or never seen": Figure(lost, "lower", target=0)}


def limit_of(share: Optional[float]) -> str:
    return "no limit" if share is None else f"{share:.0%} of the memory"


# -- report ------------------------------------------------------------------------------------------------------------

HEADS = (
    "contender", "limit", "time", "batch", "steps", "rows again / unseen", "rows per step", "OOM", "held out",
    "curve apart", "peak",
)  # fmt: skip


def grid_of(results: Sequence[Result], shares: Sequence[float]) -> Grid:
    """Return the table. ``limit`` and ``peak`` are relative to what stock needs without a limit."""
    need_mib = of(results, None, AS_CONFIGURED.name)[0]["peak_over_first_step_mib"]
    rows = [row(results, None, contender.name, need_mib) for contender in REFERENCES]
    limited = (OURS.name, OURS_FULL.name, AS_CONFIGURED.name, AUTO_FIND.name, BY_HAND)
    for share in shares:
        rows += [*(row(results, share, contender, need_mib) for contender in limited), search_row(results, share)]
    return Grid(HEADS, [*rows, ["Composer", "", composer(), *[""] * (len(HEADS) - 3)]])


def row(results: Sequence[Result], share: Optional[float], contender: str, need_mib: float) -> list[str]:
    """Return a row of the table, from the last round except for the time, because only times vary between rounds."""
    last = of(results, share, contender)[-1]
    first = [contender, "none" if share is None else f"{share:.2f}", time_cell(results, share, contender)]
    first.append(f"{last['batch_rows']} + checkpointing" if last["checkpointing"] else str(last["batch_rows"]))
    if "steps_due" not in last:  # the process was killed
        return [*first, *["-"] * (len(HEADS) - len(first))]
    apart, bits = last["loss_distance"], last["held_out_bits"]
    return [
        *first,
        f"{last['steps_executed']} of {last['steps_due']}",
        f"{last['rows_repeated']} / {last['rows_never_seen']}",
        str(last["rows_per_step"]),
        str(last["out_of_memory"]),
        "-" if bits is None else f"{bits:.3f}",
        "-" if apart is None else f"{apart:.0e}",
        f"{last['peak_over_first_step_mib'] / need_mib:.2f}",
    ]


def time_cell(results: Sequence[Result], share: Optional[float], contender: str, key: str = "wall_s") -> str:
    """Return the median time over rounds, and the number of rounds that did not finish, if any."""
    found, times = of(results, share, contender), ratios(results, share, contender, key)
    died = sum(one["error"] is not None for one in found)
    said = [f"{median(times):.2f}"] if times else []
    return ", ".join(
        [*said, *(["died" if died == len(found) else f"died {died} of {len(found)} times"] if died else [])]
    )


def search_row(results: Sequence[Result], share: float) -> list[str]:
    tries = of(results, share, BY_HAND)[-1]["tries"]
    said = ["its search", f"{share:.2f}", time_cell(results, share, BY_HAND, "search_s")]
    return [*said, ", ".join(str(one["batch_rows"]) for one in tries), *[""] * (len(HEADS) - len(said) - 1)]


def notes(results: Sequence[Result]) -> Iterator[str]:
    """Yield notes on what killed a contender, and on how ours adapted to the limit, in the last round."""
    last = max(one["round"] for one in results)
    for one in results:
        if one["round"] != last:
            continue
        name = f"{one['contender']}, {limit_of(one['share'])}"
        for tried in one.get("tries", [{}, one])[1:]:  # the first try is the contender "stock"
            if tried["error"]:
                yield f"{name}, batch {tried['batch_rows']}, after {tried['wall_s']:.1f} s: {tried['error']}"
        if "chunks" in one:
            ran, padded = one["chunks"], one["processed_tokens"]
            yield f"{name}, {one['wall_s']:.1f} s: {ran} micro-batches of {padded} padded tokens"
        for change in one.get("changes", []):
            most, reason = change["tokens_per_chunk"], change["reason"]
            yield f"{name}, step {change['step']}: at most {most} tokens at once: {reason}"


def main(words: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=JOB.steps, help="optimizer steps that are due")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of what stock takes unlimited")
    parser.add_argument("--repeats", type=int, default=2, help="rounds")
    parser.add_argument("--quick", action="store_true", help="every path on tiny sizes; writes nothing")
    given = parser.parse_args(words)
    job, shares = (QUICK, QUICK_SHARES) if given.quick else (replace(JOB, steps=given.steps), given.shares)
    repeats = 1 if given.quick else given.repeats
    results = measured(job, shares, repeats)
    grid, figures = grid_of(results, shares), figures_of(results, shares)
    title = f"batch {job.batch_rows} x accumulation {job.accumulation}, {job.steps} steps under a hard limit; "
    title += "time: ours = 1; limit, peak: stock without a limit = 1"
    console = Console(width=140, highlight=False, markup=False)
    console.print(*notes(results), sep="\n")
    if given.quick:
        console.print(grid.table(title), *(one.said(key) for key, one in figures.items()), sep="\n")
        console.print("test run: nothing is written")
        return
    finish("under_a_limit", title, grid, figures, repeats=repeats, results=results)


if __name__ == "__main__":
    main()
