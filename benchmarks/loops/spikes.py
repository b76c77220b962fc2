"""Undoing steps with a spike: are good steps left alone, are bad rows found, and how good is the final model?

    python benchmarks/loops/spikes.py [--groups 4] [--seeds 0] [--steps 100] [--rates 0.03] [--bases embedded docs sums]

sound     ``--groups`` times 32 byte models (``benchmarks/lib/byte_models.py``) and the clean trainings below: how many
          of their steps would be undone? None in n steps means a rate below 3/n, with 95 % confidence. Their seeds
          begin at FIRST_GROUP, because threshold and band were chosen on earlier ones.
injected  a base is tuned by LoRA on text of its own kind, where a share of the rows is replaced by bad ones: another
          script, labels in random order, or one repeated token. Bases: ``embedded``, which has a high loss on its text;
          and the small ones of the retention study, which know ``docs`` (prose) or ``sums`` (lines of sums).
          Contenders: gradient clipping at 1 (the default of transformers), the same with the guard, and, instead of the
          guard, clipping by rows, which keeps the step and scales outlier rows down to the usual norm. The result is
          held-out bits per token at the end.
cost      CPU time of the decision relative to the whole training, and clean trainings with the guard relative to
          those without.

Bad rows come after the first FEWEST steps. Contenders of one condition run one after the other, with the same weights,
rows and order. Results are printed as soon as they are measured.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median_low
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from transformers import TrainerCallback

from benchmarks.lib import retention_work
from benchmarks.lib.byte_models import byte_rows, setups, train
from benchmarks.lib.common import RowList, Stopwatch, collator, embedded_data, embedded_model, quiet, scratch_arguments
from benchmarks.lib.outcome import Figure, Grid, finish
from scu_trainer import SCUTrainer
from scu_trainer.control.guard.spikes import FEWEST, SpikeState, observe
from scu_trainer.data import PreparedData, default_cache_dir, embedded_tokenizer, prepare
from scu_trainer.data.embedded import python_docs
from scu_trainer.settings import SafetySettings
from scu_trainer.train.evaluation.scoring import score_documents
from scu_trainer.train.loop import Loop
from scu_trainer.train.loops.guard.parts import loss_of, step_parts, unchanged
from scu_trainer.train.loops.guard.spikes import FAR, SpikeWatch
from scu_trainer.train.run_directory.logs import run_log

MODELS, SERIES_STEPS, FIRST_GROUP = 32, 600, 200
BLOCK, BATCH, RATE, HELD_OUT_ROWS = 64, 4, 3e-3, 48
BASES = ("embedded", "docs", "sums")
MOST_FALSE_ALARMS = 1e-4
THRESHOLD = SafetySettings().spike_threshold
CYRILLIC = [chr(code) for code in range(0x410, 0x450)]
KINDS = ("other script", "shuffled labels", "one token")
CONTENDERS: dict[str, dict[str, Any]] = {
    "clipping": {"max_grad_norm": 1.0},
    "guard": {"max_grad_norm": 1.0, "safety": SafetySettings(spike_guard="skip", divergence="off")},
    "rows clipped": {"max_grad_norm": 1.0, "clips_rows": True},
}


# -- sound steps -------------------------------------------------------------------------------------------------------


def alarms(series: Sequence[tuple[float, float]]) -> int:
    """Count the steps of a series of (loss, gradient norm) that would be undone, or for which the band starts over."""
    state, count = SpikeState(), 0
    for loss, norm in series:
        state, verdict = observe(THRESHOLD, state, loss=loss, norm=norm)
        count += verdict.excess is not None
    return count


def sound_series(groups: int) -> Iterator[dict[str, Any]]:
    texts = [text for _, text in python_docs()]
    for group in range(FIRST_GROUP, FIRST_GROUP + groups):
        batch, length, is_even = (1, 2, 4, 8)[group % 4], (32, 64)[group // 4 % 2], group // 2 % 2 == 1
        rows = byte_rows(texts, length, is_even, group)
        found = train(setups(MODELS, group), rows, batch, SERIES_STEPS)
        counted = {"steps": MODELS * SERIES_STEPS, "alarms": sum(alarms(series) for series in found)}
        yield {"group": group, "batch": batch, "length": length, "even_rows": is_even, **counted}


# -- bad rows ----------------------------------------------------------------------------------------------------------


def bad_row(kind: str, row: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    ids = list(row["input_ids"])
    tokenizer = embedded_tokenizer(default_cache_dir(None))
    if kind == "shuffled labels":
        return {"input_ids": ids, "labels": draw.sample(ids, len(ids))}
    if kind == "one token":
        ids = [draw.choice(ids)] * len(ids)
    else:
        text = "".join(draw.choices(CYRILLIC, k=len(ids)))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: len(ids)]
    return {"input_ids": ids, "labels": list(ids)}


class ClipRows(Loop):
    """A contender with the same band: in a spike it scales outlier rows to the usual norm, and keeps the step."""

    name = "clip_rows"

    def __init__(self) -> None:
        self.state, self.clipped = SpikeState(), 0

    def on_window(self, batches, num_items) -> None:
        self._window, self._items = batches, num_items

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.loss = 0.0

    def on_loss(self, loss, num_items) -> None:
        self.loss += float(loss)

    def on_grad_norm(self, norm):
        self.state, verdict = observe(THRESHOLD, self.state, loss=self.loss, norm=float(norm))
        if verdict.is_spike:
            self._clip([p for p in self.trainer.model.parameters() if p.requires_grad])
        return norm

    def _clip(self, weights: Sequence[torch.nn.Parameter]) -> None:
        with unchanged(self.trainer), torch.enable_grad():
            rows = [
                torch.autograd.grad(loss_of(self.trainer, part, self._items), weights)
                for part in step_parts(self.trainer, self._window)
            ]
        norms = [float(torch.nn.utils.get_total_norm(row)) for row in rows]
        usual = median_low(norms)
        factors = [usual / norm if norm > FAR * usual else 1.0 for norm in norms]
        self.clipped += sum(factor < 1 for factor in factors)
        for number, weight in enumerate(weights):
            weight.grad = sum(factor * row[number] for factor, row in zip(factors, rows, strict=True))
        torch.nn.utils.clip_grad_norm_(weights, self.trainer.args.max_grad_norm)


class Record(TrainerCallback):
    """Records (loss, gradient norm) of every logged step."""

    def __init__(self) -> None:
        self.series: list[tuple[float, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and logs.get("grad_norm") is not None and "loss" in logs:
            self.series.append((logs["loss"], logs["grad_norm"]))


def data_of(base: str, seed: int) -> PreparedData:
    if base == "embedded":
        split = {"dataset_size": 300, "validation_split_percentage": 20}
        return embedded_data(seed, dataset="stdlib_docstrings", block_size=BLOCK, **split)
    cache = default_cache_dir(None)
    settings = retention_work.text_settings(base, block_size=BLOCK)
    return prepare(settings, embedded_tokenizer(cache), seed=seed, cache_dir=cache, model_name=base)


def model_of(base: str, seed: int) -> torch.nn.Module:
    return embedded_model(seed) if base == "embedded" else retention_work.tuned(base, "small", seed)


def tuned(name: str, base: str, seed: int, steps: int, kind: Optional[str], rate: float) -> dict[str, Any]:
    options = dict(CONTENDERS[name])
    data = data_of(base, seed)
    draw, rows = random.Random(seed), [dict(row) for row in data.train.select(range(steps * BATCH))]
    late = range(FEWEST * BATCH, len(rows))  # earlier steps are not judged, so the model could learn bad rows there
    bad = set(draw.sample(late, round(rate * len(late)))) if kind else set()
    rows = [bad_row(kind, row, draw) if number in bad else row for number, row in enumerate(rows)]
    rows = [{key: row[key] for key in ("input_ids", "labels")} for row in rows]
    record, clip = Record(), ClipRows() if options.pop("clips_rows", False) else None
    inside = Stopwatch()
    with (
        scratch_arguments(
            max_steps=steps,
            learning_rate=RATE,
            logging_steps=1,
            per_device_train_batch_size=BATCH,
            seed=seed,
            train_sampling_strategy="sequential",
            max_grad_norm=options.pop("max_grad_norm"),
        ) as arguments,
        inside.on((SpikeWatch, "is_spike")),
    ):
        trainer = SCUTrainer(
            model=model_of(base, seed),
            args=arguments,
            data_collator=collator(),
            train_dataset=RowList(rows),
            callbacks=[record, *([clip] if clip else [])],
            **options,
        )
        begun = time.process_time()
        quiet(trainer).train()
        cpu_s = time.process_time() - begun
        held_out = data.eval.select(range(min(HELD_OUT_ROWS, len(data.eval))))
        bits = score_documents(trainer.model, held_out, collator()).bpt
    found: dict[str, Any] = {"base": base, "kind": kind or "clean", "rate": rate, "seed": seed, "contender": name}
    found |= {
        "bits": bits,
        "cpu_s": cpu_s,
        "inside_s": inside.seconds,
        "steps": steps,
        "rows_clipped": clip.clipped if clip else 0,
    }
    found |= {"bad_rows": len(bad), "series_alarms": alarms(record.series)}
    found |= {"series": [[round(loss, 4), round(norm, 4)] for loss, norm in record.series]}
    found |= {"steps_with_bad_rows": sorted({number // BATCH + 1 for number in bad})}
    guard = trainer.nonfinite_guard
    if guard is not None:
        counted = guard.figures()["bad_numbers"]
        undone = {one["step"] for one in counted["skipped"]}
        named = {_number(one["step"], name) for one in counted["skipped"] for name in one["rows"]}
        found |= {key: counted["spikes"][key] for key in ("skipped_steps", "level_shifts")}
        found |= {"named_bad": len(named & bad), "named_sound": len(named - bad)}
        found |= {"bad_in_undone": sum(number // BATCH + 1 in undone for number in bad)}
        found |= {"undone_without_bad": len(undone - set(found["steps_with_bad_rows"]))}
    return found


def _number(step: int, name: str) -> int:
    """Return the number of the sample that a message calls "row 2 of accumulation batch 0". Rows are not shuffled."""
    return (step - 1) * BATCH + int(name.split()[1])


# -- the report --------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.03])
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    options = parser.parse_args()
    torch.set_num_threads(1)  # for models this small, more threads only wait for each other
    what: list[tuple[Optional[str], float]] = [(None, 0.0), *((kind, rate) for rate in options.rates for kind in KINDS)]
    conditions = [(base, *one) for base in options.bases for one in what]
    runs: list[dict[str, Any]] = []
    sound: list[dict[str, Any]] = []
    with run_log():
        for seed in options.seeds:
            for base, kind, rate in conditions:
                for name in CONTENDERS:
                    runs.append(tuned(name, base, seed, options.steps, kind, rate))
                    shown = {
                        k: round(v, 4) if isinstance(v, float) else v for k, v in runs[-1].items() if k != "series"
                    }
                    print(shown, flush=True)
    for one in sound_series(options.groups):
        sound.append(one)
        print(one, flush=True)
        _finish(runs, sound, conditions)  # after each condition, so that an interrupted run keeps its results


def _finish(runs: list[dict[str, Any]], sound: list[dict[str, Any]], conditions: list[tuple]) -> None:
    clean = [run for run in runs if run["kind"] == "clean"]
    live = [run for run in clean if run["contender"] == "guard"]
    bare = [run for run in clean if run["contender"] == "clipping"]  # the others are the same steps once more
    judged = sum(one["steps"] - MODELS * FEWEST for one in sound) + sum(run["steps"] - FEWEST for run in bare)
    count = sum(one["alarms"] for one in sound) + sum(run["series_alarms"] for run in bare)
    rows = [_row(base, kind or "clean", rate, runs) for base, kind, rate in conditions]
    spent = [sum(run["cpu_s"] for run in clean if run["contender"] == name) for name in ("guard", "clipping")]
    injected = [run for run in runs if run["kind"] != "clean" and run["contender"] == "guard"]
    count_bad = sum(run["bad_rows"] for run in injected)
    figures = {
        "sound steps that were judged": Figure(judged, None),
        "false alarms": Figure(count, "lower", target=0),
        "false alarm rate, upper bound (95 %)": Figure(
            (3 if count == 0 else _upper(count)) / judged, "lower", target=MOST_FALSE_ALARMS
        ),
        "clean: held-out bits, guard - clipping": Figure(
            max(abs(_difference(base, "clean", 0.0, runs=runs)) for base in {base for base, _, _ in conditions}),
            "lower",
            target=0.0,
            tolerance=1e-9,
        ),
        "bad rows in steps that were undone": Figure(
            sum(run["bad_in_undone"] for run in injected) / max(1, count_bad), "higher"
        ),
        "sound rows named, of all named": Figure(
            sum(run["named_sound"] for run in injected)
            / max(1, sum(run["named_sound"] + run["named_bad"] for run in injected)),
            "lower",
        ),
        "decision, share of the CPU time": Figure(
            sum(run["inside_s"] for run in live) / max(1e-9, sum(run["cpu_s"] for run in live)), "lower", target=0.01
        ),
        "clean trainings, CPU time guard / clipping": Figure(spent[0] / max(1e-9, spent[1]), None),
    }
    heads = [
        "base",
        "rows",
        *(f"{name}, bits" for name in CONTENDERS),
        "undone",
        "bad rows undone",
        "named",
        "sound named",
    ]
    title = f"spikes: {len({run['seed'] for run in runs})} seed(s), LoRA"
    finish(
        "spikes", title, Grid(heads, rows), figures, repeats=len({run["seed"] for run in runs}), runs=runs, sound=sound
    )


def _upper(count: int) -> float:
    """Return the 95 % upper bound of a Poisson mean after ``count`` > 0 events (Wilson and Hilferty, 1931)."""
    return (count + 1) * (1 - 1 / (9 * (count + 1)) + 1.645 / (3 * (count + 1) ** 0.5)) ** 3


def _of(name: str, *condition: Any, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs of contender ``name``. ``condition``: base, kind, rate."""
    return [run for run in runs if (run["contender"], run["base"], run["kind"], run["rate"]) == (name, *condition)]


def _difference(*condition: Any, runs: list[dict[str, Any]]) -> float:
    pairs = zip(_of("guard", *condition, runs=runs), _of("clipping", *condition, runs=runs), strict=True)
    return mean(guard["bits"] - other["bits"] for guard, other in pairs)


def _row(base: str, kind: str, rate: float, runs: list[dict[str, Any]]) -> list[str]:
    cells = [f"{mean(run['bits'] for run in _of(name, base, kind, rate, runs=runs)):.4f}" for name in CONTENDERS]
    guarded = _of("guard", base, kind, rate, runs=runs)
    total = {key: sum(run[key] for run in guarded) for key in ("skipped_steps", "bad_in_undone", "bad_rows")}
    named = [sum(run[key] for run in guarded) for key in ("named_bad", "named_sound")]
    undone = f"{total['bad_in_undone']} of {total['bad_rows']}"
    return [base, f"{kind}, {rate:.0%}", *cells, str(total["skipped_steps"]), undone, str(named[0]), str(named[1])]


if __name__ == "__main__":
    main()
