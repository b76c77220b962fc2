"""Does bad input ever cause a traceback, a hang or a half-written run? Seeded cases through the real command.

    python benchmarks/loops/fuzz.py [--cases 500] [--seed 0] [--kinds numbers "odd names"] [--jobs 1]
    python benchmarks/loops/fuzz.py --again "numbers 0.17"

A case is a kind and a seed (tests/fuzz/cases.py): files, flags, settings, folders and models that a user may have. Each
runs in its own folder under a time limit, in a fork of this process, which has imported everything once. Every 20th
also runs as a separate program, and both must agree. A case must be accepted (exit code 0), or refused with exit code
2, one message, no traceback and no new file. A run that had begun and stopped because of its numbers (a non-finite
loss) may leave its files, with the error in run.json. Exit code 1 if any case does anything else.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a pool of threads does not survive the fork of a case
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import write_result
from tests.fuzz.cases import KINDS, make_case
from tests.fuzz.site import Site, make_site
from tests.fuzz.verdict import ACCEPTED, FAILED, OFFENCES, REFUSED, Verdict, clear, run_case

PROGRAM_EVERY = 20


def run_all(site: Site, names: list[tuple[str, str]], console: Console) -> dict[str, Any]:
    found: dict[str, Counter[str]] = {kind: Counter() for kind, _ in names}
    offenders, disagreements, programs = [], [], 0
    for number, (kind, seed) in enumerate(names):
        if number and number % 100 == 0:
            console.print(f"{number} of {len(names)} cases, {len(offenders)} offenders")
        verdict, words = one(site, kind, seed)
        found[kind][verdict.what] += 1
        if verdict.is_offence:
            offenders.append(_offender(kind, seed, words, verdict))
            console.print(f"[red]{escape(str(offenders[-1]))}[/red]", soft_wrap=True)
        if number % PROGRAM_EVERY == 0:
            programs += 1
            other, _ = one(site, kind, seed, forked=False)
            if (other.what, other.code) != (verdict.what, verdict.code):
                disagreements.append({**_offender(kind, seed, words, other), "forked": verdict.what})
                console.print(f"[red]{escape(str(disagreements[-1]))}[/red]", soft_wrap=True)
    return {
        "kinds": {kind: dict(sorted(counts.items())) for kind, counts in found.items()},
        "as_programs_too": programs,
        "disagreements": disagreements,
        "offenders": offenders,
    }


def one(site: Site, kind: str, seed: str, forked: bool = True) -> tuple[Verdict, list[str]]:
    folder = Path(tempfile.mkdtemp(prefix="case", dir=site.folder))
    try:
        words = make_case(kind, seed, folder, site)
        return run_case(words, folder, forked=forked), words
    finally:
        clear(folder)


def _offender(kind: str, seed: str, words: list[str], verdict: Verdict) -> dict[str, Any]:
    last = [line for line in verdict.said.splitlines() if line.strip()][-1:]
    return {
        "again": f"{kind} {seed}",
        "what": verdict.what,
        "code": verdict.code,
        "said": (verdict.message or "".join(last))[:300],
        "command": " ".join(word if len(word) < 100 else f"{word[:40]}... ({len(word)} letters)" for word in words),
    }


def again(site: Site, name: str, console: Console) -> int:
    kind, _, seed = name.rpartition(" ")
    verdict, words = one(site, kind, seed)
    console.print(escape(shlex.join(words)), soft_wrap=True)
    console.print(escape(verdict.said), soft_wrap=True)
    console.print(f"{verdict.what}, exit code {verdict.code}, {verdict.seconds:.1f} s")
    return int(verdict.is_offence)


def show(result: dict[str, Any], console: Console) -> None:
    columns = (ACCEPTED, REFUSED, FAILED, *OFFENCES)
    table = Table("kind", "cases", *columns)
    for kind, counts in result["kinds"].items():
        table.add_row(kind, str(sum(counts.values())), *(str(counts.get(name, 0)) for name in columns))
    console.print(table)
    console.print(f"{result['as_programs_too']} as programs too, {len(result['disagreements'])} ended in another way")


def warm_up() -> None:
    """Import what every command imports, before the first fork."""
    import importlib

    from scu_trainer.cli.main import COMMANDS, MODULES

    for name in COMMANDS:
        importlib.import_module(f"scu_trainer.cli.{MODULES.get(name, name)}")
    for name in ("scu_trainer.train.session.session", "scu_trainer.cli.evaluation.scoring", "datasets", "peft",
                 "pandas", "transformers.models.llama.modeling_llama", "torch.utils.tensorboard"):  # fmt: skip
        importlib.import_module(name)


def numbered(cases: int, seed: int, kinds: list[str]) -> Iterator[tuple[str, str]]:
    for number in range(cases):
        yield kinds[number % len(kinds)], f"{seed}.{number // len(kinds)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which a case counts as hung (60)")
    parser.add_argument("--again", metavar="CASE", help='one case, such as "numbers 0.17", with all that it prints')
    options, console = parser.parse_args(), Console(width=160)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCU_TRAINER_CACHE"], os.environ["HF_HOME"] = f"{folder}/cache", f"{folder}/huggingface"
        warm_up()
        site = make_site(Path(folder))
        if options.again:
            return again(site, options.again, console)
        result = run_all(site, list(numbered(options.cases, options.seed, options.kinds)), console)
    show(result, console)
    write_result("fuzz", {"seed": options.seed, "cases": options.cases, **result})
    return 1 if result["offenders"] or result["disagreements"] else 0


if __name__ == "__main__":
    sys.exit(main())
