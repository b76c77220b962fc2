"""Is every optimizer step's gradient that of the stock Trainer, unless a warning says otherwise? Random trainings.

    python benchmarks/loops/exactness.py --cases 1000
    python benchmarks/loops/exactness.py --architectures

Cases combine model families, losses, padding, accumulation and unbalanced labels (lib/exactness_cases.py). A step is
wrong if its gradient differs from that of stock by more than 1e-5, relative to its largest entry, and no line of the
log says so. ``--seed N --cases 1`` runs one case again.

``--architectures`` trains every text architecture of transformers instead (lib/architectures.py), made tiny, with
random weights and without dropout; causal models a second time with ``chunked_loss: always``. Those that cannot be made
this small are listed with the reason. Ten vision-language models follow, with no, one or two images in a row
(lib/image_text.py). Names after it choose some of them.
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers import logging as transformers_logging

from benchmarks.lib import architectures
from benchmarks.lib.common import RowList, quiet, write_result
from benchmarks.lib.exactness_cases import STEPS, Case, case_of, pad
from scu_trainer import SCUTrainer
from scu_trainer.settings import CurriculumSettings, MemorySettings

BOUND = 1e-5
WARNED = ("a split batch would not give the gradient", "batches run whole", "cannot be cut by rows")


class Gradients(TrainerCallback):
    """Records gradients. ``steps``: for each optimizer step, the gradients by name. ``draws``: whether computing them
    drew random numbers. Tells modules that change with time which step it is."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.draws = False

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.before = torch.get_rng_state()
        if hasattr(model, "late"):
            model.late.fill_(state.global_step)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.draws |= not torch.equal(self.before, torch.get_rng_state())
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


class Lines(logging.Handler):
    """Collects the warnings of one run, each with its step."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def with_loss(base: type, case: Case) -> type:
    """Return a subclass of ``base`` with the loss of ``case``, as a user would write it."""
    if case.compute_loss is None:
        return base

    class Own(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            asked = {name: value for name, value in inputs.items() if name != "sample_index"}
            outputs = model(**{name: value for name, value in asked.items() if name != "labels"})
            loss = case.compute_loss(model, asked, outputs)
            return (loss, outputs) if return_outputs else loss

    return Own


def run(case: Case, ours: bool, folder: str) -> tuple[Gradients, Any]:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=10_000,
        optim="sgd",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=STEPS,
        per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=case.accumulation,
        train_sampling_strategy="random"
        if case.has_statistics
        else "sequential",  # with statistics, the curriculum has its own sampler
        remove_unused_columns=False,
        **case.arguments,
    )
    own: dict[str, Any] = {}
    if ours:
        own["memory"] = MemorySettings(**case.cut)
        # The loss of a subclass would have to handle the column that the statistics of rows need.
        own["curriculum"] = CurriculumSettings("none") if case.has_statistics and case.compute_loss is None else None
    found = Gradients()
    kind = with_loss(SCUTrainer if ours else Trainer, case)
    trainer = kind(
        model=case.make(),
        args=arguments,
        train_dataset=RowList(case.rows),
        data_collator=pad,
        callbacks=[found],
        compute_loss_func=case.loss_function,
        **own,
    )
    quiet(trainer).train()
    return found, trainer


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    largest = max(float(g.abs().max()) for g in expected.values())
    apart = max(float((found[name] - g).abs().max()) if name in found else largest for name, g in expected.items())
    return apart / max(largest, 1e-12)


def outcome(case: Case) -> dict[str, Any]:
    lines = Lines()
    logger = logging.getLogger("scu_trainer")
    logger.addHandler(lines)
    try:
        with tempfile.TemporaryDirectory() as folder:
            expected, _ = run(case, False, folder)
            found, trainer = run(case, True, folder)
    finally:
        logger.removeHandler(lines)
    statistics = trainer.micro_batches.loop.statistics
    reduction = trainer.micro_batches.reduction
    errors = [distance(*both) for both in zip(found.steps, expected.steps, strict=True)]
    return {
        "seed": case.seed,
        "name": case.name,
        "splittable": case.splits,
        "is_split": statistics.chunks > case.accumulation * STEPS
        or statistics.processed_tokens < statistics.stock_tokens,
        "could_split": _could_split(case),
        "worst": max(errors),
        "wrong_steps": [step for step, error in enumerate(errors, start=1) if error > BOUND],
        "warned": [line for line in lines.lines if any(part in line for part in WARNED)],
        "known": reduction and reduction.known,
        "why_whole": reduction.mixes if reduction else "no rows told",
        "draws": expected.draws,
        "steps": len(errors),
    }


def _could_split(case: Case) -> bool:
    """Whether the settings allow micro-batches smaller than the batches."""
    if "max_batch_size" in case.cut:
        return case.batch > case.cut["max_batch_size"]
    lengths = {len(row["input_ids"]) if "input_ids" in row else 1 for row in case.rows}
    if case.cut["token_cap"] == "auto":
        return len(lengths) > 1
    return case.batch * max(lengths) > case.cut["token_cap"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--architectures", nargs="*", metavar="NAME", help="train these, or all, in place of cases")
    parser.add_argument("--no_result", action="store_true", help="write no file")
    options = parser.parse_args()
    logging.getLogger("scu_trainer").propagate = False
    torch.set_num_threads(1)
    if options.architectures is not None:
        sys.exit(1 if train_architectures(options)["silently_wrong"] else 0)
    results, began = [], time.monotonic()
    for seed in range(options.seed, options.seed + options.cases):
        results.append(outcome(case_of(seed)))
        if len(results) % 50 == 0:
            spent = time.monotonic() - began
            print(f"{len(results)} of {options.cases} cases, {spent:.0f} s", file=sys.stderr, flush=True)
    print_tables(results)
    figures = summary(results)
    if not options.no_result:
        write_result("exactness", figures, f"python benchmarks/loops/exactness.py --cases {options.cases}")
    sys.exit(1 if figures["wrong_without_a_word"] else 0)


def train_architectures(options: argparse.Namespace) -> dict[str, Any]:
    """Train them, print and write the results; return the summary."""
    transformers_logging.set_verbosity_error()
    results = []
    for head in architectures.MAPPINGS:
        for result in architectures.results_of(outcome, head, options.architectures):
            results.append(result)
            words = result.get("not_tried") or result.get("refused") or f"{result['worst']:.1e}"
            if "worst_in_float32" in result:
                words += f" in float64, {result['worst_in_float32']:.1e} in float32"
            print(f"{head:9} {result['architecture']:28} {result['way']:8} {words}", flush=True)
    figures = architectures.summary(results)
    print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
    if not options.no_result:
        write_result("architectures", {**figures, "results": results})
    return figures


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    splittable = [one for one in results if one["splittable"] and one["could_split"]]
    silent = [one for one in results if one["wrong_steps"] and not one["warned"]]
    split = [one for one in splittable if one["is_split"]]
    whole = collections.Counter((one["name"], one["why_whole"]) for one in splittable if not one["is_split"])
    return {
        "cases": len(results),
        "steps": sum(one["steps"] for one in results),
        "wrong_without_a_word": [{key: one[key] for key in ("seed", "name", "worst", "wrong_steps")} for one in silent],
        "wrong_and_said": sum(bool(one["wrong_steps"]) for one in results) - len(silent),
        "largest_error_where_nothing_was_said": max(
            (one["worst"] for one in results if not one["warned"]), default=0.0
        ),
        "splittable": len(splittable),
        "split": len(split),
        "known_by_the_function_called": sum(one["known"] is not None for one in results),
        "splittable_but_whole": [{"name": name, "why": why, "cases": n} for (name, why), n in whole.most_common()],
    }


def print_tables(results: list[dict[str, Any]]) -> None:
    names = sorted({one["name"] for one in results})
    print(f"{'family x loss':58} {'cases':>5} {'split':>5} {'known':>5} {'said':>5} {'worst, nothing said':>20}")
    for name in names:
        own = [one for one in results if one["name"] == name]
        quiet_worst = max((one["worst"] for one in own if not one["warned"]), default=0.0)
        counts = (sum(map(bool, (one[key] for one in own))) for key in ("is_split", "known", "warned"))
        print(f"{name:58} {len(own):5} {' '.join(f'{n:5}' for n in counts)} {quiet_worst:20.1e}")
    figures = summary(results)
    print(f"\n{figures['cases']} cases, {figures['steps']} optimizer steps")
    print(f"wrong without a word: {len(figures['wrong_without_a_word'])}; wrong and said: {figures['wrong_and_said']}")
    share = figures["split"] / max(figures["splittable"], 1)
    print(f"splittable: {figures['splittable']}, of these split: {figures['split']} ({share:.1%})")
    for one in figures["splittable_but_whole"]:
        print(f"  whole although splittable, {one['cases']} x {one['name']}: {one['why']}")
    for one in figures["wrong_without_a_word"]:
        print(f"  SILENT seed {one['seed']}: {one['name']}, steps {one['wrong_steps']}, {one['worst']:.1e}")


if __name__ == "__main__":
    main()
