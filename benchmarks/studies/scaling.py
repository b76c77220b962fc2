"""How do ours and the stock Trainer scale with ranks, with the size of a step, and with the number of documents?

    python benchmarks/studies/scaling.py ranks        1 -> 2 processes (gloo), the same rows per optimizer step
    python benchmarks/studies/scaling.py sizes        block, rows per batch and LoRA rank grow
    python benchmarks/studies/scaling.py documents    10 thousand -> 10 million documents through the loader
    ... --quick                               every path on tiny sizes; nothing is written

ranks: a small Llama on rows of different lengths, with one thread per process, started by torchrun. Results are
relative to one process, so two of them reach 2.0 at best. Ours has memory loop, curriculum (losses tracked) and safety
on. The contenders are started alternately; the time is the median optimizer step after the first ones. The work is the
same: the held-out loss at the end is equal with one rank and with two.

sizes: rows of one length, so that there is no padding to save. Both contenders take turns of five optimizer steps.
"relative" is tokens per second relative to stock at the first point of the series.

documents: rows of a few tokens in a memory-mapped Arrow file, as the commands store them. Each contender is a fresh
process with a tiny model, ours with all loops. Seconds are from opening the file to the end of the first optimizer
step. Memory is anonymous memory (RssAnon), without mapped pages of the file, which the kernel can reclaim. "held" is
the memory after every document was seen, "peak" the highest reading until the end, including two checkpoints; both are
above what the process held before it opened the file. Then `scu-trainer train --streaming true` on JSONL and parquet:
seconds from the start of the process to its first logged step, and its peak.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.outcome import finish
from benchmarks.studies.scaling_parts import documents, ranks, sizes

PARTS = {"ranks": ranks, "sizes": sizes, "documents": documents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--repeats", type=int, help="times that each contender runs")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    options = parser.parse_args()
    part = PARTS[options.part]
    repeats = options.repeats or (1 if options.quick else part.REPEATS)
    title, grid, figures, results = part.measure(repeats, options.quick)
    if options.quick:
        said = (one.said(key) for key, one in figures.items())
        Console(width=140).print(grid.table(title), *said, "test run: nothing is written", sep="\n")
        return
    finish(f"scaling_{options.part}", title, grid, figures, repeats=repeats, results=results)


if __name__ == "__main__":
    main()
