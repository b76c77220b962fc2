"""After training: find the share of the update that keeps the budget, and judge it on rows that decided nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from scu_trainer.control.retention import SOLVED_AT, largest_share
from scu_trainer.errors import ModelError, OutOfMemory
from scu_trainer.models.scaling import ScaledUpdate
from scu_trainer.settings.mixture import short_name
from scu_trainer.train.evaluation.scoring import BootstrapInterval, DocumentScores, bootstrap_difference
from scu_trainer.train.retention.passages import Passages
from scu_trainer.train.step.recovery.second_try import second_try

LEVEL = 0.95
"""Confidence level of the verdict's interval, as in ``scu-trainer retain``."""


@dataclass
class Judged:
    """The verdict. ``figures``: for scu_metrics.json."""

    figures: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def verdict(loop: Any) -> Judged:
    """Scale the update of the model of ``loop`` to its budget, and judge the result. Every rank does the same."""
    judged = Judged()
    whole = _measure_loss_increase(loop, "unseen", LEVEL)
    share = _scale_to_budget(loop, judged)
    lost = whole if share == 1.0 else _measure_loss_increase(loop, "unseen", LEVEL)
    budget = loop.config.budget_bits
    judged.figures |= {
        "scale": share,
        "lost_bits": asdict(lost),
        "lost_bits_of_the_whole_update": asdict(whole),
        "is_within_budget": lost.value <= budget,
    }
    if lost.value > budget:
        judged.notices.append(
            f"{lost.value:.4f} bits per token are lost on the unseen part of {loop.anchor.name} "
            f"({lost.low:+.4f} to {lost.high:+.4f}), more than the budget of {budget:g}"
        )
    return judged


def _measure_loss_increase(loop: Any, part: str, confidence: float) -> BootstrapInterval:
    rows: Passages = loop._parts[part]
    numbers = rows.all()
    after = rows.by_document(numbers, rows.scored(numbers))
    before = rows.by_document(numbers, loop._base[part])
    return bootstrap_difference(before, after, confidence=confidence, seed=loop.trainer.args.seed)


def _scale_to_budget(loop: Any, judged: Judged) -> float:
    """Scale the update, and return its share in the model; 1 if all of it fits the budget, or it cannot be scaled."""
    budget, whole = loop.config.budget_bits, _measure_loss_increase(loop, "measured", SOLVED_AT)
    tried = judged.figures.setdefault("tried", [])
    tried.append({"share": 1.0, "bits": whole.value, "high": whole.high})
    if whole.high <= budget:
        return 1.0
    update = _load_scalable_update(loop, judged)
    if update is None:
        return 1.0
    own_before = _score_own_rows(loop)

    def cost(share: float) -> float:
        if share == 1.0:
            return whole.high
        update.set(share)
        found = _measure_loss_increase(loop, "measured", SOLVED_AT)
        tried.append({"share": share, "bits": found.value, "high": found.high})
        return found.high

    share = largest_share(cost, budget)
    if share == 0.0 and cost(0.0) > budget:  # a continued adapter without its beginning given as the base
        update.set(1.0)
        judged.notices.append(
            f"more than the budget is lost, and the update is left whole: without it {tried[-1]['bits']:.4f} bits per "
            "token would be lost, because training did not begin with the base of its adapter"
        )
        return 1.0
    judged.figures |= _own_text_figures(loop, update, share, own_before)
    update.set(share)
    judged.notices.append(
        f"{share:.1%} of what was learned is kept, by scaling the update: all of it would lose {whole.value:.4f} "
        f"bits per token on {loop.anchor.name}, and the budget is {budget:g}; checkpoints keep all of it"
    )
    return share


def _load_scalable_update(loop: Any, judged: Judged) -> Optional[ScaledUpdate]:
    """Return the update of the model as an object that can scale it; None, with a notice, if that is impossible."""
    model = loop.trainer.model
    is_adapter = hasattr(model, "peft_config")
    try:
        if not is_adapter and loop.base is None:
            raise ModelError("the model that full tuning started from was not given")
        return second_try(
            lambda: ScaledUpdate(model, _load_start(loop)), "the base, which is needed to scale the update,"
        )
    except (ModelError, OutOfMemory) as error:
        judged.notices.append(
            f"more than the budget is lost, and the update cannot be scaled here: {error}; scu-trainer retain scales a "
            "finished run"
        )
        return None


def _load_start(loop: Any) -> Any:
    """Return the model that the update started from; None for a new adapter, which contains it."""
    start = None if loop.base is None else loop.base()
    return start if hasattr(start, "peft_config") or not hasattr(loop.trainer.model, "peft_config") else None


def _score_own_rows(loop: Any) -> Optional[DocumentScores]:
    """Return the scores of held-out rows of the training task by the model as it is."""
    if loop.own_rows is None:
        return None
    rows = Passages(loop.own_rows, loop.trainer, loop._collate)
    return rows.by_document(rows.some(), rows.scored(rows.some()))


def _own_text_figures(loop: Any, update: ScaledUpdate, share: float, whole: Optional[DocumentScores]) -> dict[str, Any]:
    """Return how much of the gain on held-out rows is left after scaling."""
    if whole is None:
        return {}
    update.set(0.0)
    before = _score_own_rows(loop)
    update.set(share)
    kept = _score_own_rows(loop)
    gains = {name: bootstrap_difference(before, after, seed=loop.trainer.args.seed)
             for name, after in (("whole", whole), ("kept", kept))}  # fmt: skip
    # 0.0 is added to turn -0.0 into 0.0, which is not printed as "-0%".
    left = gains["kept"].value / gains["whole"].value + 0.0 if gains["whole"].value < 0 else None
    return {"own_text": {name: gain.over(before) for name, gain in gains.items()}, "share_of_gain_kept": left}


def verdict_lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    lost = found.get("lost_bits")
    if lost is None:
        return []
    outcome = "kept" if found["is_within_budget"] else "NOT kept"
    bits = f"{lost['value']:+.4f} bits per token ({lost['low']:+.4f} to {lost['high']:+.4f})"
    lines = [
        (
            f"lost on {short_name(found['anchor'])}",
            f"{bits} on unseen documents; the budget of {found['budget_bits']:g} is {outcome}",
        )
    ]
    if found["scale"] < 1:
        kept = found.get("share_of_gain_kept")
        gain = "" if kept is None else f", {kept:.0%} of the gain on held-out text"
        lines.append(("update kept", f"{found['scale']:.1%}{gain}"))
    if found["replayed_rows"]:
        lines.append(("replayed", f"{found['replayed_rows']:,} rows of {found['anchor']}, on top of the training data"))
    if found["overhead_fraction"] is not None:
        lines.append(("cost of measuring", f"{found['overhead_fraction']:.2%} of the training time"))
    return lines + [("note", text) for text in found["notices"]]
