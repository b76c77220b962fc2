"""Do short trainings find the learning rate for a long one? Compared with the best rate of a whole grid.

    python benchmarks/studies/find_rate.py [--only SUBSTRING ...] [--report]

A condition is a small job: a Llama of 1.2 million weights, trained on Python's documentation, learns another text. Each
rate of a grid (factor 2) trains all steps, and also a quarter and half of them, with a schedule of that length, from
the same weights with the same random numbers and batches. A rule sees only the short trainings and chooses a rate of
the grid. Its result is how much higher the held-out loss of the whole training with that rate is than the best of the
grid, in nats per token. A rule is good enough with at most 0.02 in 9 of 10 conditions.

Half of the conditions were used to choose a rule (development), the others to check it (confirmation). A training takes
seconds to half a minute on one core. Each is written to results/find_rate.json immediately and is not repeated, so that
a stopped run continues. Half of the steps are trained only around the rate that is best after a quarter. --report
trains nothing and uses the results in the file. A condition counts if the best rate of its grid has a worse neighbour
on both sides. The file has figures for regressions.py once all conditions count.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split


import numpy as np
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from benchmarks.lib.common import (
    collator,
    earlier,
    embedded_data,
    quiet,
    scratch_arguments,
    shown,
    write_result,
)
from benchmarks.lib.outcome import Figure, Grid, finish
from scu_trainer import SCUTrainer
from scu_trainer.cli.configuration import read_job
from scu_trainer.cli.names.translation import as_flags
from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.data.embedded import EXTRACTORS
from scu_trainer.errors import NonFiniteLoss
from scu_trainer.settings import SafetySettings
from scu_trainer.train.evaluation.scoring import DocumentScores, bootstrap_difference
from scu_trainer.train.job.job import Job
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.session.building import build_trainer
from scu_trainer.train.session.training import score

NAME = "find_rate"
TITLE = "Learning rates by short trainings: nats per token that a rule's choice loses beside the best of the grid"
QUARTER, HALF, WHOLE = 1 / 4, 1 / 2, 1.0
FACTOR, RATES = 2.0, 7
PIECE_CHARACTERS = 110
MOST_NATS = 0.02
LORA, FULL = {"tuning": "lora"}, {"tuning": "full"}
TEXTS = {"source": "stdlib_source", "docstrings": "stdlib_docstrings"}


@dataclass(frozen=True)
class Condition:
    """A job. ``text``: of TEXTS, or sums. ``lowest``: the lowest rate. ``settings``: besides the common ones."""

    name: str
    side: str
    text: str
    documents: int
    steps: int
    lowest: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def rates(self) -> list[float]:
        return [self.lowest * FACTOR**number for number in range(RATES)]

    def steps_of(self, share: float) -> int:
        return round(self.steps * share)


CONDITIONS = [
    Condition("lora r8, source, linear", "development", "source", 300, 48, 1e-3, {**LORA}),
    Condition("full, docstrings, linear", "development", "docstrings", 300, 48, 1.25e-4, {**FULL}),
    Condition(
        "lora r32 alpha 128, docstrings, constant, batch 8", "development", "docstrings", 400, 32, 5e-4,
        {**LORA, "lora_r": 32, "lora_alpha": 128, "lr_scheduler_type": "constant", "per_device_train_batch_size": 8},
    ),
    Condition(
        "full, source, constant, batch 2, 3 passes", "development", "source", 60, 72, 1.25e-4,
        {**FULL, "lr_scheduler_type": "constant", "per_device_train_batch_size": 2},
    ),
    Condition("lora r2, sums, linear", "development", "sums", 300, 48, 5e-4, {**LORA, "lora_r": 2}),
    Condition(
        "full, source, cosine, 96 steps", "confirmation", "source", 600, 96, 1.25e-4,
        {**FULL, "lr_scheduler_type": "cosine"},
    ),
    Condition(
        "lora r2, docstrings, constant", "confirmation", "docstrings", 300, 48, 5e-4,
        {**LORA, "lora_r": 2, "lr_scheduler_type": "constant"},
    ),
    Condition(
        "lora r32, source, linear, batch 8", "confirmation", "source", 400, 32, 1e-3,
        {**LORA, "lora_r": 32, "lora_alpha": 32, "per_device_train_batch_size": 8},
    ),
    Condition(
        "lora r8 alpha 64, docstrings, linear, batch 2, 3 passes", "confirmation", "docstrings", 60, 72, 5e-4,
        {**LORA, "lora_alpha": 64, "per_device_train_batch_size": 2},
    ),
    Condition(
        "full, sums, linear, bfloat16, warm-up", "confirmation", "sums", 300, 32, 1e-3,
        {**FULL, "mixed_precision": "bf16", "warmup_steps": 6},
    ),
]  # fmt: skip


# -- a condition -------------------------------------------------------------------------------------------------------


def texts(kind: str, count: int) -> list[str]:
    """Return documents of about 40 tokens."""
    chance = random.Random(0)
    if kind == "sums":
        pairs = [[(chance.randint(1, 99), chance.randint(1, 99)) for _ in range(3)] for _ in range(count)]
        return [" ".join(f"{a} plus {b} is {a + b}." for a, b in lines) for lines in pairs]
    longest = 6 * PIECE_CHARACTERS
    whole = [text[:longest] for _, text in EXTRACTORS[TEXTS[kind]]()]
    starts = range(0, longest, PIECE_CHARACTERS)
    pieces = [text[start : start + PIECE_CHARACTERS] for text in whole for start in starts]
    pieces = [piece for piece in pieces if len(piece.strip()) > PIECE_CHARACTERS // 2]
    chance.shuffle(pieces)
    return pieces[:count]


def base(folder: Path) -> Path:
    """Return the base of 1.2 million weights, which is trained on Python's documentation at the first call."""
    if folder.exists():
        return folder
    tokenizer = embedded_tokenizer(default_cache_dir(None))
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ids))
    data = embedded_data(0, dataset="python_docs", block_size=128, validation_split_percentage=0.0)
    how = {"max_steps": 160, "learning_rate": 4e-3, "lr_scheduler_type": "cosine", "warmup_steps": 20}
    with scratch_arguments(**how) as arguments:
        quiet(SCUTrainer(model, arguments, train_dataset=data.train, data_collator=collator())).train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def job_of(condition: Condition, scratch: Path) -> Job:
    documents = scratch / f"{condition.text}-{condition.documents}.jsonl"
    rows = texts(condition.text, condition.documents)
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    settings = {
        "model_name_or_path": str(base(scratch / "llama")),
        "dataset": str(documents),
        "block_size": 48,
        "packing": False,
        "validation_split_percentage": 20.0,
        "max_eval_documents": 40,
        "per_device_train_batch_size": 4,
        "lr_scheduler_type": "linear",
        "max_steps": condition.steps,
        "mixed_precision": "no",
        "use_cpu": True,
        "seed": 0,
        "report_to": "none",
        "output_dir": str(scratch / "run"),
        "scu": False,
        "memory_control": False,
        "chunked_loss": "never",
        **condition.settings,
    }
    return read_job(None, as_flags(settings))


class Unwatched(Job):
    """A job that keeps no statistics of its rows."""

    acting_curriculum = None


class Trainings:
    """Trainings of one job, each from the same weights with the same random numbers."""

    def __init__(self, job: Job) -> None:
        job.check()
        safety = SafetySettings(preflight="off", divergence="off")
        self.parts = job.kind.load(job, Console(quiet=True))
        self.job = replace(Unwatched(**vars(job)), safety=safety, data=replace(job.data, sample_prompts=0))
        model = self.parts.model
        self._start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def trained(self, rate: float, steps: int) -> Optional[DocumentScores]:
        """Train, and return the held-out scores; None if the loss is not finite."""
        with tempfile.TemporaryDirectory() as scratch:
            training = copy.copy(self.job.training)
            training.output_dir, training.learning_rate, training.max_steps = scratch, rate, steps
            training.warmup_steps = round(training.warmup_steps * steps / self.job.training.max_steps)
            training.logging_steps = steps
            for name in ("save_strategy", "eval_strategy"):
                setattr(training, name, type(getattr(training, name))("no"))
            job = replace(self.job, training=training)
            set_seed(training.seed)
            trainer = build_trainer(job, self.parts, None, Console(quiet=True))
            try:
                trainer.train()
                found = score(job, trainer, self.parts)
            except NonFiniteLoss:
                found = None
            self.parts.model.load_state_dict(self._start, strict=False)
            trainer.accelerator.unwrap_model(self.parts.model, keep_fp32_wrapper=False)
        return found if found is not None and math.isfinite(found.nats.sum()) else None


# -- points ------------------------------------------------------------------------------------------------------------


class Points:
    """The trainings of a condition: held-out scores by (number of the rate in the grid, steps), None if the loss was
    not finite. ``rows``: as in the file."""

    def __init__(self, condition: Condition, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.condition = condition
        self.found = {(row["rate"], row["steps"]): _scores(row) for row in rows}

    def rows(self) -> list[dict[str, Any]]:
        return [{"rate": rate, "steps": steps, **_row(scores)} for (rate, steps), scores in sorted(self.found.items())]

    def losses(self, share: float) -> dict[int, float]:
        """Return the nats per token by the number of the rate."""
        steps = self.condition.steps_of(share)
        return {rate: _nats(scores) for (rate, of), scores in self.found.items() if of == steps}

    @property
    def is_judged(self) -> bool:
        """Whether the best rate of the whole trainings is known, because it has a worse neighbour on both sides."""
        whole = self.losses(WHOLE)
        return bool(whole) and {lowest(whole) - 1, lowest(whole) + 1} <= whole.keys()

    @property
    def has_halves(self) -> bool:
        """Whether half of the steps were trained around the best rate of a quarter."""
        best = lowest(self.losses(QUARTER))
        return set(range(max(0, best - 1), min(RATES, best + 2))) <= self.losses(HALF).keys()


def _row(scores: Optional[DocumentScores]) -> dict[str, Any]:
    if scores is None:
        return {"nats_per_token": None}
    per_document = {"nats": " ".join(f"{nats:.3f}" for nats in scores.nats)}
    per_document["tokens"] = " ".join(str(tokens) for tokens in scores.tokens)
    return {"nats_per_token": round(_nats(scores), 5), **per_document}


def _scores(row: Mapping[str, Any]) -> Optional[DocumentScores]:
    if row["nats_per_token"] is None:
        return None
    return DocumentScores(np.array(row["nats"].split(), dtype=float), np.array(row["tokens"].split(), dtype=int))


def _nats(scores: Optional[DocumentScores]) -> float:
    return math.inf if scores is None else float(scores.nats.sum() / scores.tokens.sum())


def missing(points: Points) -> Iterator[tuple[int, int]]:
    """Yield the (rate, steps) that are still to be trained, from the middle of the grid outward; half of the steps only
    around the best rate of a quarter."""
    of = points.condition
    for rate in sorted(range(RATES), key=lambda rate: (abs(rate - RATES // 2), -rate)):
        for share in (QUARTER, WHOLE):
            if (rate, of.steps_of(share)) not in points.found:
                yield rate, of.steps_of(share)
    best = lowest(points.losses(QUARTER))
    for rate in range(max(0, best - 1), min(RATES, best + 2)):
        if (rate, of.steps_of(HALF)) not in points.found:
            yield rate, of.steps_of(HALF)


def measure(points: Points, every: Sequence[Points], scratch: Path, console: Console) -> None:
    trainings = None
    for rate, steps in missing(points):
        if trainings is None:
            trainings = Trainings(job_of(points.condition, scratch))
        points.found[rate, steps] = trainings.trained(points.condition.rates[rate], steps)
        nats = _nats(points.found[rate, steps])
        console.print(f"{points.condition.name}: {points.condition.rates[rate]:.2e}, {steps} steps: {nats:.4f} nats")
        write_result(NAME, {"trainings": {one.condition.name: one.rows() for one in every}})


# -- rules -------------------------------------------------------------------------------------------------------------


def lowest(losses: Mapping[int, float]) -> int:
    return min(losses, key=lambda rate: (losses[rate], rate))


def valley(losses: Mapping[int, float]) -> float:
    """Return the minimum of the parabola through the best rate and its neighbours, in steps of the grid; the best rate
    if a neighbour is missing."""
    best = lowest(losses)
    left, middle, right = (losses.get(rate, math.inf) for rate in (best - 1, best, best + 1))
    if not (math.isfinite(left) and math.isfinite(right)) or left - 2 * middle + right <= 0:
        return float(best)
    return best + 0.5 * (left - right) / (left - 2 * middle + right)


def not_told_apart(points: Points) -> int:
    """Return the lowest of the adjacent rates that do not differ from the best after a quarter of the steps, paired
    over documents (95 %)."""
    steps = points.condition.steps_of(QUARTER)
    rate = best = lowest(points.losses(QUARTER))
    while (other := points.found.get((rate - 1, steps))) is not None:
        if bootstrap_difference(points.found[best, steps], other).low > 0:
            break
        rate -= 1
    return rate


def projected(points: Points) -> int:
    """Return the rate that follows if the minimum moves from half to all steps as it moved from a quarter to half."""
    quarter, half = valley(points.losses(QUARTER)), valley(points.losses(HALF))
    return round(2 * half - quarter)


RULES: dict[str, Callable[[Points], int]] = {
    "quarter": lambda points: lowest(points.losses(QUARTER)),
    "quarter, one lower": lambda points: lowest(points.losses(QUARTER)) - 1,
    "quarter, lowest alike": not_told_apart,
    "half": lambda points: lowest(points.losses(HALF)),
    "half, one lower": lambda points: lowest(points.losses(HALF)) - 1,
    "projected": projected,
}
"""The rules. ``half``: successive halving, with a quarter of the steps at every rate, then half of them at the three
best. ``one lower``: half of the rate."""


OF_HALF = ("half", "half, one lower", "projected")


def excess(points: Points, rule: str) -> Optional[float]:
    """Return how many nats per token more the chosen rate has than the best of the grid; infinite for a rate below the
    grid; None if trainings that the rule needs are missing."""
    if rule in OF_HALF and not points.has_halves:
        return None
    whole, named = points.losses(WHOLE), RULES[rule](points)
    if 0 <= named < RATES and named not in whole:
        return None
    return whole.get(named, math.inf) - min(whole.values())


def report(every: Sequence[Points], console: Console) -> None:
    rows, missed, figures = [], {}, {}
    judged = [points for points in every if points.is_judged]
    for points in judged:
        whole, rates = points.losses(WHOLE), points.condition.rates
        bests = [f"{rates[lowest(points.losses(share))]:.2e}" for share in (QUARTER, WHOLE)]
        lost = [shown(excess(points, rule), 4) for rule in RULES]
        rows.append([points.condition.name, points.condition.side, *bests, shown(min(whole.values())), *lost])
    for rule in RULES:
        found = [lost for points in judged if (lost := excess(points, rule)) is not None]
        beyond = sum(lost > MOST_NATS for lost in found)
        missed[rule] = {"judged": len(found), "missed": beyond}
        figures[f"within {MOST_NATS} nats, {rule}"] = Figure(1 - beyond / max(1, len(found)), "higher", target=0.9)
        console.print(f"{rule}: {beyond} of {len(found)} conditions lose more than {MOST_NATS} nats")
    grid = Grid(["condition", "side", "best of a quarter", "best of all", "nats", *RULES], rows)
    trainings = {points.condition.name: points.rows() for points in every}
    if all(one["judged"] == len(CONDITIONS) for one in missed.values()):
        finish(NAME, TITLE, grid, figures, most_nats=MOST_NATS, trainings=trainings, missed=missed)
        return
    console.print(grid.table(TITLE))
    left_out = [points.condition.name for points in every if points not in judged]
    console.print(f"the best rate of their grid is not known yet: {'; '.join(left_out)}" if left_out else "")
    write_result(NAME, {"missed": missed, "not_judged": left_out, "trainings": trainings})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="train conditions whose name holds one of these")
    parser.add_argument("--report", action="store_true", help="train nothing, judge by the results that are there")
    asked, console = parser.parse_args(), Console(highlight=False, soft_wrap=True, width=140)
    torch.set_num_threads(1)
    scratch, before = Path(tempfile.gettempdir()) / "find_rate", earlier(NAME).get("trainings", {})
    scratch.mkdir(exist_ok=True)
    every = [Points(condition, before.get(condition.name, ())) for condition in CONDITIONS]
    chosen = [points for points in every if not asked.only or any(word in points.condition.name for word in asked.only)]
    with run_log():
        for points in () if asked.report else chosen:
            measure(points, every, scratch, console)
    report(every, console)


if __name__ == "__main__":
    main()
