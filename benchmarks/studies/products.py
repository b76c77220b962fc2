"""Is oneDNN or MKL faster for the matrix products of the output layer, and which should the chunked loss use here?

    python benchmarks/studies/products.py [--repeats 21] [--quick]

Rows, words and hidden size are those of a chunk of the loss, in float32, with torch's default number of threads. A
ratio is the time of MKL divided by that of oneDNN: above 1 oneDNN is faster. The last line is a product of square
matrices, which shows the difference of the libraries on this processor in general.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.outcome import Figure, Grid, finish
from scu_trainer.train.loss.rows import products
from scu_trainer.train.loss.rows.kernels import rows_in_chunk
from scu_trainer.train.loss.rows.pages import new_empty

SHAPES = ((2_000, 256), (16_384, 256), (32_000, 256), (50_257, 768), (128_000, 256), (128_000, 1024))
"""(words, hidden size)."""
SIDE = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--quick", action="store_true", help="one small shape; writes nothing")
    given = parser.parse_args()
    if products._operator() is None:
        parser.error("this torch has no oneDNN, or another form of its product: there is nothing to compare")
    torch.manual_seed(0)
    shapes, repeats = (SHAPES[:1], 2) if given.quick else (SHAPES, given.repeats)
    results = [measured(words, size, repeats) for words, size in shapes]
    square = torch.randn(SIDE, SIDE)
    square_ratio = ratio(lambda: products.from_words(square, square, square), repeats)
    rows = [
        [f"{one['words']:,} words x {one['size']:,}", str(one["rows"]), f"{one['logits']:.2f}", f"{one['hidden']:.2f}"]
        for one in results
    ]
    heads = ["output layer", "rows", "logits, oneDNN / MKL", "gradient of hidden states, oneDNN / MKL"]
    figures = {
        f"speed of {name}, oneDNN / MKL, {one['words']:,} words x {one['size']:,}": Figure(one[name], None)
        for one in results
        for name in ("logits", "hidden")
    }
    finish(
        "products",
        f"{torch.get_num_threads()} threads, float32",
        Grid(
            heads,
            [*rows, [f"square matrices, {SIDE:,} x {SIDE:,}", str(SIDE), f"{square_ratio:.2f}", f"{square_ratio:.2f}"]],
        ),
        figures,
        quick=given.quick,
        repeats=repeats,
        results=results,
    )


def measured(words: int, size: int, repeats: int) -> dict[str, float]:
    rows = rows_in_chunk(words)
    hidden, weight = torch.randn(rows, size), torch.randn(words, size)
    logits = new_empty(hidden, (rows, words), torch.float32)
    return {
        "words": words,
        "size": size,
        "rows": rows,
        "logits": ratio(lambda: products.to_words(hidden, weight, None, logits), repeats),
        "hidden": ratio(lambda: products.from_words(logits, logits, weight), repeats),
    }


def ratio(product: Callable[[], object], repeats: int) -> float:
    """Return the median over pairs of MKL's time divided by oneDNN's."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    chosen = products.goes_through_onednn
    try:
        for _ in range(repeats + 1):
            for through_onednn in seconds:
                products.goes_through_onednn = lambda weight, way=through_onednn: way
                begun_s = time.perf_counter()
                product()
                seconds[through_onednn].append(time.perf_counter() - begun_s)
    finally:
        products.goes_through_onednn = chosen
    return median(mkl / onednn for onednn, mkl in zip(seconds[True][1:], seconds[False][1:], strict=True))


if __name__ == "__main__":
    main()
