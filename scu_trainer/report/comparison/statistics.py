"""Confidence intervals over seeds, and the conclusions that they allow. All functions here are pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Optional

from scu_trainer.figures import count_text

FEWEST_SEEDS = 3
"""With fewer pairs of seeds, a difference is not judged."""

FEW_SEEDS = 10
"""With fewer seeds a note says that an interval depends strongly on its own scatter."""

BySeed = Mapping[int, float]


@dataclass(frozen=True)
class ConfidenceInterval:
    """Mean, and Student's t interval around it. ``low`` and ``high`` are None for a single value."""

    value: float
    low: Optional[float]
    high: Optional[float]


def t_interval(values: Sequence[float], confidence: float) -> Optional[ConfidenceInterval]:
    """Return the interval of the mean of ``values``, assumed independent and roughly normal; None without values."""
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1:
        return ConfidenceInterval(mean, None, None)
    half_width = t_quantile(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return ConfidenceInterval(mean, mean - half_width, mean + half_width)


def t_quantile(confidence: float, degrees: int) -> float:
    """Return how many standard errors a two-sided interval extends to each side. ``degrees``: degrees of freedom."""
    from scipy.stats import t

    return float(t.ppf((1.0 + confidence) / 2.0, degrees))


def paired_difference(values: BySeed, reference: BySeed, confidence: float) -> Optional[ConfidenceInterval]:
    """Return the mean of ``values`` minus ``reference`` over the seeds that both have; None if there are none."""
    return t_interval([values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())], confidence)


def direction(difference: Optional[ConfidenceInterval], pairs: int) -> str:
    """Return "lower", "higher", "none" (the interval contains 0), or "unknown" (fewer than FEWEST_SEEDS pairs)."""
    if difference is None or difference.low is None or pairs < FEWEST_SEEDS:
        return "unknown"
    if difference.high < 0:
        return "lower"
    return "higher" if difference.low > 0 else "none"


def sentence(difference: Optional[ConfidenceInterval], pairs: int, reference: str) -> str:
    """Put the difference of an arm from ``reference`` into a sentence."""
    found = direction(difference, pairs)
    if found == "unknown":
        return f"too few seeds to judge: {pairs} of at least {FEWEST_SEEDS}"
    if found == "none":
        return f"no difference found: {difference.value:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"
    low, high = sorted((abs(difference.low), abs(difference.high)))
    return f"{found} than {reference} by {abs(difference.value):.3f} ({low:.3f} to {high:.3f})"


# -- over all arms -----------------------------------------------------------------------------------------------------


def overall(arms: Mapping[str, BySeed], reference: str, confidence: float) -> str:
    """Return the verdict over all arms. ``arms``: for each arm, including the reference, the held-out bits by seed."""
    others = [name for name in arms if name != reference]
    if not others:
        return _spread_sentence(list(arms[reference].values()), confidence)
    found = {name: _direction_against(arms, name, reference, confidence) for name in others}
    judged = [name for name in others if found[name] != "unknown"]
    if not judged:
        return f"No conclusion yet: no arm has {FEWEST_SEEDS} finished seeds in common with {reference}."
    said = [_found_sentence(found, kind, reference) for kind in ("lower", "higher")]
    unknown = [name for name in others if found[name] == "unknown"]
    if unknown:
        said.append(f"Not judged: {', '.join(unknown)}.")
    return " ".join([*said, best(arms, confidence)])


def _spread_sentence(values: Sequence[float], confidence: float) -> str:
    """Describe the scatter of a single arm over its seeds."""
    interval = t_interval(values, confidence)
    if interval is None or interval.low is None:
        return "Fewer than two seeds are finished, so there is no spread."
    return (
        f"Mean {interval.value:.3f} over {len(values)} seeds, standard deviation {stdev(values):.3f}, "
        f"{percent(confidence)} t interval of the mean {interval.low:.3f} to {interval.high:.3f}."
    )


def _direction_against(arms: Mapping[str, BySeed], name: str, other: str, confidence: float) -> str:
    pairs = len(arms[name].keys() & arms[other].keys())
    return direction(paired_difference(arms[name], arms[other], confidence), pairs)


def _found_sentence(found: Mapping[str, str], kind: str, reference: str) -> str:
    names = [name for name in found if found[name] == kind]
    if not names:
        return f"No arm was found {kind} than {reference}."
    return f"Found {kind} than {reference}: {', '.join(names)}."


def best(arms: Mapping[str, BySeed], confidence: float) -> str:
    """Name the best arm, if its interval against every other arm supports that, or say why none is named."""
    full = {name: values for name, values in arms.items() if len(values) >= FEWEST_SEEDS}
    if len(full) < 2:
        return "No best arm is named: fewer than two have enough seeds."
    lowest = min(full, key=lambda name: fmean(full[name].values()))
    rivals = [name for name in full if name != lowest and _direction_against(full, lowest, name, confidence) != "lower"]
    if not rivals:
        return f"{lowest} is lower than every other arm that was judged."
    return f"No best arm is named: {lowest} has the lowest mean, and was not found lower than {', '.join(rivals)}."


def notes(arms: Mapping[str, BySeed], reference: str, confidence: float, seeds: int) -> list[str]:
    """Return what a reader must know to judge the verdict: how many seeds and comparisons, and what chance gives."""
    others = [name for name in arms if name != reference]
    judged = [name for name in others if _direction_against(arms, name, reference, confidence) != "unknown"]
    found = [f"Seeds: {seeds}. {_seeds_note(seeds)}"]
    if judged:
        count = len(judged)
        expected = count * (1.0 - confidence)
        corrected = 1.0 - (1.0 - confidence) / count
        still = [name for name in judged if _direction_against(arms, name, reference, corrected) in ("lower", "higher")]
        compared = f"{count} arm{'s were' if count > 1 else ' was'} compared with {reference}"
        found.append(
            f"{compared} at {percent(confidence)}: if none of them differed, chance alone would call {expected:.2g} of "
            f"them lower or higher on average. With intervals widened for {count_text(count, 'comparison')} "
            f"(Bonferroni) there remain: {', '.join(still) or 'none'}."
        )
    found.append(
        "An interval covers the scatter over seeds on this model, data and number of steps, and nothing else. "
        "No difference found does not mean that there is none."
    )
    return found


def percent(share: float) -> str:
    """ "95 %"."""
    return f"{100 * share:g} %"


def _seeds_note(seeds: int) -> str:
    if seeds < FEWEST_SEEDS:
        return f"That is too few to judge: give {FEWEST_SEEDS} or more, such as --seeds 0 1 2."
    if seeds < FEW_SEEDS:
        return "That is few: a small difference will not be found, and an interval depends strongly on its own scatter."
    return "Pairs of an arm and the reference share their seed."
