"""``scu-trainer retain``: keeps as much of a trained update as a budget for the loss on other text allows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.evaluation.eval import evaluation_request
from scu_trainer.cli.evaluation.options import EvalOptions, HarnessOptions
from scu_trainer.cli.main import guarded, stdout_to_stderr
from scu_trainer.cli.origin import base_subject
from scu_trainer.cli.parsing import Parser, add_consent
from scu_trainer.cli.subjects import Subject, subject_of
from scu_trainer.control.retention import SOLVED_AT, largest_share
from scu_trainer.errors import DataError, ModelError, SettingsError
from scu_trainer.figures import count_text
from scu_trainer.models.loading.load import load_for_evaluation
from scu_trainer.models.loading.names import is_adapter
from scu_trainer.run_files import require_room, require_writable, write_json
from scu_trainer.settings.tasks import TEXT

if TYPE_CHECKING:
    from scu_trainer.cli.evaluation.scoring import EvaluationRequest
    from scu_trainer.train.evaluation.scoring import BootstrapInterval, DocumentScores

RETAIN_FILE = "retain.json"
LEAST_DOCUMENTS = 8
CONFIDENCE = 0.95

DESCRIPTION = """\
Learn this, lose at most that: keeps as much of what RUN has learned as it can without losing more than BITS
per token on the documents of FILE, compared with the model that it was tuned from. Half of the documents decide how
much; the other half only measure what it costs. Writes the model, or the adapter, with that share of its update
(WiSE-FT)."""


def _parser() -> Parser:
    parser = Parser(prog="scu-trainer retain", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="a run, a checkpoint, an adapter, or with --base a full model")
    parser.add_argument("--anchor", required=True, metavar="FILE", help="text to keep: a file or a dataset")
    parser.add_argument("--budget_bits", type=float, required=True, metavar="BITS",
                        help="bits per token of that text that may be lost, for instance 0.05")  # fmt: skip
    parser.add_argument("--base", metavar="MODEL", help="what it was tuned from; default: as the run or adapter says")
    parser.add_argument("--output_dir", metavar="DIR", help="default: RUN-retained next to the run")
    parser.add_argument("--max_documents", type=int, default=400, metavar="N",
                        help="documents of FILE to use, at most; default: 400")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the halves and of the resampling")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_consent(parser)
    return parser


@guarded
def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if not 0 <= options.budget_bits < float("inf"):
        raise SettingsError(f"budget_bits is {options.budget_bits:g}; give 0 or more, for instance 0.05")
    tuned, base = _subjects(options)
    folder = Path(options.output_dir or f"{Path(options.run).resolve()}-retained")
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise SettingsError(f"{folder} is not empty; give another --output_dir")
    require_writable(folder)
    with stdout_to_stderr():
        report = _retain(tuned, base, options, folder)
    print(json.dumps(report, allow_nan=False) if options.json else as_text(report))
    return 0


def _subjects(options: Any) -> tuple[Subject, Subject]:
    tuned = subject_of(options.run)
    if tuned.task != TEXT:
        raise ModelError(f"{tuned.name} has task {tuned.task}; retain keeps text, so it needs task {TEXT}")
    base = base_subject(tuned, "--base") if options.base is None else subject_of(options.base)
    return tuned.with_consent(options), base.with_consent(options)


# -- the share ---------------------------------------------------------------------------------------------------------


class Shares:
    """The documents of ``request``, scored at shares of the update of ``tuned``."""

    def __init__(self, request: EvaluationRequest, tuned: Subject, base: Subject) -> None:
        from scu_trainer.models.scaling import ScaledUpdate

        model, self.processor, self._parts = request.loaded(tuned)
        is_whole = not is_adapter(Path(tuned.source))
        self.update = ScaledUpdate(model, load_for_evaluation(base.source, base.model) if is_whole else None)
        self._request, self._tuned = request, tuned

    def scores(self, share: float) -> DocumentScores:
        with self.update.at(share):
            return self._request.scores(self._tuned, self._parts)


def _retain(tuned: Subject, base: Subject, options: Any, folder: Path) -> dict[str, Any]:
    evaluation = EvalOptions(seed=options.seed)
    solution = _choose_share(tuned, base, options, folder, evaluation)  # its model is freed before the next is loaded
    report = {**solution, "own_text": _own_text(tuned, base, solution["share"], evaluation), "folder": str(folder)}
    write_json(folder / RETAIN_FILE, report)
    return report


def _choose_share(tuned: Subject, base: Subject, options: Any, folder: Path, evaluation: EvalOptions) -> dict[str, Any]:
    """Find the largest share within the budget, write the model with that share, and return what the share costs."""
    anchor = {"eval_dataset": options.anchor, "max_eval_documents": options.max_documents}
    shares = Shares(evaluation_request([tuned, base], anchor, evaluation, HarnessOptions()), tuned, base)
    before, tried = shares.scores(0.0), []
    deciding, judging = _split_in_halves(len(before.nats), options.seed)

    def cost(share: float) -> float:
        loss = _lost_bits(before, shares.scores(share), deciding, SOLVED_AT, options.seed)
        tried.append({"share": share, "bits": loss.value, "high": loss.high})
        return loss.high

    share = largest_share(cost, options.budget_bits)
    lost, whole = (_lost_bits(before, shares.scores(part), judging, CONFIDENCE, options.seed) for part in (share, 1.0))
    require_room(folder.parent, shares.update.size_bytes)
    shares.update.save(share, folder)
    shares.processor.save_pretrained(folder)
    return {
        "run": tuned.name, "base": base.name, "anchor": options.anchor, "budget_bits": options.budget_bits,
        "share": share, "deciding_documents": len(deciding), "judging_documents": len(judging),
        "lost_bits": asdict(lost), "lost_bits_of_the_whole_update": asdict(whole),
        "is_within_budget": lost.value <= options.budget_bits, "tried": tried,
    }  # fmt: skip


def _own_text(tuned: Subject, base: Subject, share: float, evaluation: EvalOptions) -> Optional[dict[str, Any]]:
    """Return what the run gained on its own held-out documents, with the whole update and with the share that is kept.
    None without a run or held-out documents."""
    from scu_trainer.train.evaluation.scoring import bootstrap_difference

    if tuned.run is None or not (tuned.data.eval_dataset or tuned.data.validation_split_percentage):
        return None
    shares = Shares(evaluation_request([tuned], {}, evaluation, HarnessOptions()), tuned, base)
    before, kept, whole = (shares.scores(part) for part in (0.0, share, 1.0))
    differences = {
        name: bootstrap_difference(before, after, seed=evaluation.seed).over(before)
        for name, after in (("whole", whole), ("kept", kept))
    }
    return {"documents": len(before.nats), **differences}


def _split_in_halves(count: int, seed: int) -> tuple[Any, Any]:
    """Return the indices of the documents that decide, and of those that judge."""
    import numpy

    if count < LEAST_DOCUMENTS:
        raise DataError(
            f"the anchor has {count} documents, but half of them decide and the other half judge; give "
            f"{LEAST_DOCUMENTS} or more, shorter ones for instance"
        )
    order = numpy.random.default_rng(seed).permutation(count)
    return order[: count // 2], order[count // 2 :]


def _lost_bits(
    before: DocumentScores, after: DocumentScores, indices: Any, confidence: float, seed: int
) -> BootstrapInterval:
    from scu_trainer.train.evaluation.scoring import DocumentScores, bootstrap_difference

    first, second = (DocumentScores(scores.nats[indices], scores.tokens[indices]) for scores in (before, after))
    return bootstrap_difference(first, second, confidence=confidence, seed=seed)


# -- the text ----------------------------------------------------------------------------------------------------------


def as_text(report: dict[str, Any]) -> str:
    lost, whole, budget = report["lost_bits"], report["lost_bits_of_the_whole_update"], report["budget_bits"]
    lines = [
        f"kept: {report['share']:.1%} of the update",
        f"on {report['anchor']}, {report['judging_documents']} documents that played no part in the decision:",
        f"  with all of it      {_bits(whole)}",
        f"  with what is kept   {_bits(lost)}, the budget is {budget:g}",
    ]
    if not report["is_within_budget"]:
        lines.append(
            "  more than the budget: the documents are few or very different; give more of them, or a smaller budget"
        )
    if report["share"] == 0:
        lines.append("no share of the update stays within the budget: the base was written unchanged")
    own = report["own_text"]
    if own:
        lines += [
            f"on what the run held out, {count_text(own['documents'], 'document')}, against the base:",
            f"  with all of it      {_bits(own['whole'])}",
            f"  with what is kept   {_bits(own['kept'])}",
        ]
    return "\n".join([*lines, f"written: {report['folder']}, {RETAIN_FILE} in it"])


def _bits(interval: dict[str, Any]) -> str:
    bits = f"{interval['value']:+.4f} bits per token"
    if interval["low"] is None:  # there was only one document
        return bits
    return f"{bits} ({interval['low']:+.4f} to {interval['high']:+.4f}, {interval['confidence']:.0%} interval)"
