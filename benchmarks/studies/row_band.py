"""Would a running band over the losses of single rows find bad rows, and how many good rows would it misjudge?

    python benchmarks/studies/row_band.py [--groups 4] [--seeds 0 1 2] [--rate 0.05]

The band is that of ``control/guard/spikes.py``, over rows instead of steps: the median and the robust standard
deviation of the logarithms of the mean losses of the last SPAN rows. For each threshold the share of rows above it is
printed:

sound   ``--groups`` times 32 byte models (``benchmarks/lib/byte_models.py``) on Python's documentation
bad     bad rows in a LoRA training of the embedded base, as in ``benchmarks/loops/spikes.py``, a share of ``--rate``,
        one kind at a time, and the good rows of these trainings; the first FEWEST trained rows are not judged

The spike guard promises at most one false alarm in 10,000 steps, and a step has at least one row.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import numpy
import torch

from benchmarks.lib.byte_models import byte_rows, setups, train
from benchmarks.lib.common import RowList, collator, embedded_data, embedded_model, quiet, scratch_arguments
from benchmarks.lib.outcome import Figure, Grid, finish
from benchmarks.loops.spikes import BATCH, BLOCK, KINDS, MODELS, RATE, bad_row
from scu_trainer import SCUTrainer
from scu_trainer.control.guard.spikes import FLOORS, QUARTILE, TO_SIGMA
from scu_trainer.control.noise import MAD_TO_SIGMA
from scu_trainer.data.embedded import python_docs
from scu_trainer.settings import CurriculumSettings
from scu_trainer.train.loops.curriculum import CurriculumLoop
from scu_trainer.train.run_directory.logs import run_log

SPAN, FEWEST = 512, 80
STEPS, TUNING_STEPS, FIRST_GROUP = 300, 64, 400
THRESHOLDS = (3, 4, 5, 6, 8, 12)
MOST_FALSE_ALARMS = 1e-4


def deviations(losses: Sequence[float]) -> numpy.ndarray:
    """Return how far each row from FEWEST on is above the median of earlier rows, in robust standard deviations."""
    values, found = numpy.log(numpy.maximum(losses, 1e-9)), []
    for number in range(FEWEST, len(values)):
        band = values[max(0, number - SPAN) : number]
        middle, quartile = numpy.quantile(band, (0.5, QUARTILE))
        around, above = MAD_TO_SIGMA * numpy.median(abs(band - middle)), (quartile - middle) / TO_SIGMA
        found.append((values[number] - middle) / max(around, above, FLOORS["loss"]))
    return numpy.array(found)


def sound(group: int) -> numpy.ndarray:
    texts = [text for _, text in python_docs()]
    batch, length, is_even = (1, 2, 4, 8)[group % 4], (32, 64)[group // 4 % 2], group // 2 % 2 == 1
    seen: list[torch.Tensor] = []
    train(setups(MODELS, group), byte_rows(texts, length, is_even, group), batch, STEPS, seen.append)
    by_model = torch.stack(seen).transpose(0, 1).reshape(MODELS, -1).numpy()
    return numpy.concatenate([deviations(losses) for losses in by_model])


def tuned(kind: str, seed: int, rate: float) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Train, and return the deviations of (bad rows, sound rows)."""
    settings = {"dataset": "stdlib_docstrings", "block_size": BLOCK, "dataset_size": 300}
    data, draw = embedded_data(seed, validation_split_percentage=20, **settings), random.Random(seed)
    rows = [dict(row) for row in data.train.select(range(TUNING_STEPS * BATCH))]
    bad = set(draw.sample(range(len(rows)), round(rate * len(rows))))
    rows = [bad_row(kind, row, draw) if number in bad else row for number, row in enumerate(rows)]
    seen: dict[int, float] = {}

    def see(loop, ids, losses):
        means = losses.sums / losses.counts.clamp(min=1)
        seen.update(zip(ids.tolist(), means.tolist(), strict=True))

    arguments = {"max_steps": TUNING_STEPS, "learning_rate": RATE, "per_device_train_batch_size": BATCH, "seed": seed}
    with (
        scratch_arguments(**arguments) as args,
        patch.object(CurriculumLoop, "see", see),
    ):
        trainer = SCUTrainer(
            model=embedded_model(seed),
            args=args,
            data_collator=collator(),
            train_dataset=RowList([{key: row[key] for key in ("input_ids", "labels")} for row in rows]),
            curriculum=CurriculumSettings(),
        )
        quiet(trainer).train()
    is_bad = numpy.array([number in bad for number in seen])[FEWEST:]
    found = deviations(list(seen.values()))
    return found[is_bad], found[~is_bad]


def share(found: numpy.ndarray, threshold: float) -> float:
    return float((found > threshold).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=0.05)
    options = parser.parse_args()
    torch.set_num_threads(1)  # for models this small, more threads only wait for each other
    bad: dict[str, numpy.ndarray] = {}
    beside: list[numpy.ndarray] = []
    with run_log():
        for kind in KINDS:
            found = [tuned(kind, seed, options.rate) for seed in options.seeds]
            bad[kind] = numpy.concatenate([of_bad for of_bad, _ in found])
            beside += [of_sound for _, of_sound in found]
            print(
                f"{kind}: {sorted(bad[kind].round(1).tolist())}; sound {max(map(max, beside)):.1f} at most", flush=True
            )
    clean = numpy.concatenate([sound(group) for group in range(FIRST_GROUP, FIRST_GROUP + options.groups)])
    _finish(clean, numpy.concatenate(beside), bad, len(options.seeds))


def _finish(clean: numpy.ndarray, beside: numpy.ndarray, bad: dict[str, numpy.ndarray], seeds: int) -> None:
    heads = ["deviations", "sound rows, byte models", "sound rows, embedded base", *bad]
    cells = [(clean, "{:.2%}"), (beside, "{:.2%}"), *((found, "{:.0%}") for found in bad.values())]
    rows = [[f"{one}", *(form.format(share(found, one)) for found, form in cells)] for one in THRESHOLDS]
    quiet_enough = [one for one in THRESHOLDS if share(clean, one) <= MOST_FALSE_ALARMS]
    lowest = min(quiet_enough, default=THRESHOLDS[-1])
    figures = {
        "sound rows that were judged": Figure(len(clean) + len(beside), None),
        "bad rows that were judged": Figure(sum(map(len, bad.values())), None),
        "lowest threshold with few enough false alarms": Figure(lowest, None),
        "bad rows above it": Figure(share(numpy.concatenate(list(bad.values())), lowest), None),
    }
    title = f"a band of row losses: {seeds} seed(s) of the embedded base"
    finish("row_band", title, Grid(heads, rows), figures, repeats=seeds)


if __name__ == "__main__":
    main()
