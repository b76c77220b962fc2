"""Compare the GRU with a bigram model with Kneser-Ney smoothing, on the same words, split and held-out texts.

    python benchmarks/studies/kneser_ney.py --run runs/gru
    python benchmarks/studies/kneser_ney.py --config recipes/gru.yaml --seeds 0 1 2

The bigram model is interpolated Kneser-Ney (Ney, Essen and Kneser, 1994; Chen and Goodman, 1998) with the discount n1 /
(n1 + 2 n2) of each order, estimated from the training split. The lower order is interpolated with the uniform
distribution, so that no held-out word has probability 0. Both models treat unknown words as one word, <unk>, and
predict the end, <eos>.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, Optional

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

NOT_LEARNED = -100
ROWS_PER_READ = 1024


class Bigrams(NamedTuple):
    """The predicted words. ``before``, ``word``: the preceding and the predicted word of each position, shape
    (places,); ``document``: the document of each position."""

    before: numpy.ndarray
    word: numpy.ndarray
    document: numpy.ndarray


class KneserNey:
    """P(word | word before). ``discounts``: of bigrams and of continuations; None estimates each.

    ``words``: the size of the vocabulary; ``never``: how many of the words are never predicted (padding, <bos>).
    ``floor``: interpolate continuations with the uniform distribution. Without it, words that are in no training text
    have probability 0.
    """

    def __init__(
        self,
        before: numpy.ndarray,
        word: numpy.ndarray,
        words: int,
        never: int = 2,
        discounts: Optional[tuple[float, float]] = None,
        floor: bool = True,
    ) -> None:
        self.words = words
        self.keys, self.counts = numpy.unique(before.astype(numpy.int64) * words + word, return_counts=True)
        self.of_context = numpy.bincount(before, minlength=words)
        kinds_before, kinds_word = numpy.divmod(self.keys, words)
        self.followers = numpy.bincount(kinds_before, minlength=words)
        continuations = numpy.bincount(kinds_word, minlength=words)
        first, second = discounts or (_discount(self.counts), _discount(continuations))
        self.discount = first
        self.lower = continuations / len(self.keys)
        if floor:
            kept = numpy.maximum(continuations - second, 0.0) / len(self.keys)
            self.lower = kept + (1.0 - kept.sum()) / (words - never)

    def probability(self, before: numpy.ndarray, word: numpy.ndarray) -> numpy.ndarray:
        """Return the probability of each position, shape (places,)."""
        total = self.of_context[before]
        kept = numpy.maximum(self._count(before, word) - self.discount, 0.0) / numpy.maximum(total, 1)
        left_over = numpy.where(total > 0, self.discount * self.followers[before] / numpy.maximum(total, 1), 1.0)
        return kept + left_over * self.lower[word]

    def _count(self, before: numpy.ndarray, word: numpy.ndarray) -> numpy.ndarray:
        wanted = before.astype(numpy.int64) * self.words + word
        places = numpy.minimum(numpy.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return numpy.where(self.keys[places] == wanted, self.counts[places], 0)


def _discount(counts: numpy.ndarray) -> float:
    """Return n1 / (n1 + 2 n2), where n1 and n2 are the numbers of items that occur once and twice."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5


def bigrams(rows) -> Bigrams:
    """Return the bigrams of all positions with a label. Rows overlap by one word, so each position is in one row."""
    parts = [_bigrams_of(row) for row in rows]
    return Bigrams(*(numpy.concatenate(part) for part in zip(*parts, strict=True)))


def _bigrams_of(row: dict) -> Bigrams:
    words, labels = numpy.asarray(row["input_ids"]), numpy.asarray(row["labels"])
    learned = labels[1:] != NOT_LEARNED
    document = row["document"] if "document" in row else row["documents"][0]
    return Bigrams(words[:-1][learned], words[1:][learned], numpy.full(int(learned.sum()), document))


def kneser_ney_perplexity(data) -> float:
    """Return the perplexity of the held-out rows of ``prepare_words`` under a model of its training rows."""
    train, held_out = bigrams(data.train), bigrams(data.eval)
    model = KneserNey(train.before, train.word, len(data.tokenizer))
    return float(numpy.exp(-numpy.log(model.probability(held_out.before, held_out.word)).mean()))


class Figures(NamedTuple):
    """The held-out perplexity per word of both models. ``train_s``: seconds of training; None for a finished run."""

    seed: int
    gru: float
    kneser_ney: float
    train_s: Optional[float] = None

    @property
    def line(self) -> str:
        seconds = "" if self.train_s is None else f", trained in {self.train_s:.0f} s"
        return (
            f"seed {self.seed}: perplexity per word: GRU {self.gru:.1f}, bigram with Kneser-Ney {self.kneser_ney:.1f}, "
            f"ratio {self.gru / self.kneser_ney:.3f}{seconds}"
        )


def of_run(folder: Path, train_s: Optional[float] = None) -> Figures:
    """Return the figures of a finished run of ``task: word-generation``, on the texts that it held out."""
    from scu_trainer.cli.subjects import split_seed, subject_of
    from scu_trainer.train.job.components import EvaluationSource
    from scu_trainer.train.tasks.words import WordTask

    subject, task = subject_of(str(folder)), WordTask()
    source = EvaluationSource(subject.model, subject.data, subject.own(task.name), split_seed(subject.run))
    parts = task.load_scored(source)
    return Figures(source.seed, task.score(parts.model, parts).perplexity, kneser_ney_perplexity(parts.data), train_s)


def of_config(config: str, seed: int, folder: Path) -> Figures:
    """Train a recipe with ``seed``, which also determines the split, and return its figures."""
    from scu_trainer.cli import train

    begin = time.monotonic()
    if code := train.main(["--config", config, "--seed", str(seed), "--output_dir", str(folder)]):
        raise SystemExit(code)
    return of_run(folder, time.monotonic() - begin)


def main() -> int:
    """Return 0 if the GRU always has a lower perplexity than the bigram model, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=Path, help="a finished run")
    what.add_argument("--config", help="a recipe, trained now once per seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if options.run:
        found = [of_run(options.run)]
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = [of_config(options.config, seed, Path(folder) / str(seed)) for seed in options.seeds]
    print("\n".join(figures.line for figures in found))
    return 0 if all(figures.gru < figures.kneser_ney for figures in found) else 1


if __name__ == "__main__":
    sys.exit(main())
