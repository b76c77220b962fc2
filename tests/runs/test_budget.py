"""The first path that fits a limit: in order of speed, never run where weights alone are too large."""

from __future__ import annotations

import pytest

from scu_trainer.runs.studies.budget import WeightCounts, first_that_fits, least_bytes
from scu_trainer.runs.studies.variant_table import BY_NAME, VARIANTS
from scu_trainer.runs.studies.variants import VariantResult

GIB = 2**30
NO_WEIGHTS = WeightCounts(0, 0)
EIGHT_BILLION = WeightCounts(weights=8_000_000_000, linear_weights=7_000_000_000, stored_bytes=4.0)


def ran(name: str, total_gib: float) -> VariantResult:
    return VariantResult(name, "ran", total_bytes=int(total_gib * GIB), step_s=1.0)


def search(outcomes: dict[str, VariantResult], limit_gib: float, sizes: WeightCounts = NO_WEIGHTS):
    variants, ran_names = [BY_NAME[name] for name in outcomes], []

    def run(variant):
        ran_names.append(variant.name)
        return outcomes[variant.name]

    found, attempts = first_that_fits(variants, int(limit_gib * GIB), sizes, run)
    return found, [attempt.verdict for attempt in attempts], ran_names


def test_the_first_that_stays_below_the_limit_ends_the_search():
    outcomes = {name: ran(name, peak) for name, peak in [("lora", 5.0), ("lora_checkpointing", 4.0), ("qlora", 1.0)]}
    found, verdicts, names = search(outcomes, limit_gib=4.0)
    assert (found.name, found.reason) == ("lora_checkpointing", "measured peak 4.00 GiB")
    assert verdicts == ["too large", "fits"]
    assert names == ["lora", "lora_checkpointing"]


def test_a_path_whose_weights_alone_exceed_the_limit_is_never_started():
    outcomes = {
        "lora": ran("lora", 1.0),
        "lora_bf16_weights": ran("lora_bf16_weights", 1.0),
        "qlora": ran("qlora", 6.5),
    }
    found, verdicts, names = search(outcomes, limit_gib=7.0, sizes=EIGHT_BILLION)
    assert verdicts == ["skipped", "skipped", "fits"]
    assert names == ["qlora"] and found.name == "qlora"


def test_nothing_fits():
    assert search({"lora": ran("lora", 5.0)}, limit_gib=4.0)[:2] == (None, ["too large"])


@pytest.mark.parametrize(
    ("message", "verdict"),
    [("error: one row alone runs out of memory", "too large"), ("error: unknown option --x", "failed")],
)
def test_a_failure_is_told_from_too_little_memory(message, verdict):
    outcomes = {"lora": VariantResult("lora", "failed", message), "qlora": ran("qlora", 1.0)}
    found, verdicts, _ = search(outcomes, limit_gib=4.0)
    assert verdicts == [verdict, "fits"] and found.name == "qlora"


def test_memory_that_nobody_measured_does_not_fit():
    assert search({"lora": VariantResult("lora", "ran", step_s=1.0)}, 4.0)[:2] == (None, ["failed"])


@pytest.mark.parametrize(
    ("name", "bytes_per_weight"),
    [
        ("lora", 4.0),
        ("lora_checkpointing", 4.0),
        ("lora_bf16_weights", 2.0),
        ("qlora_8bit", (7 * 1.0 + 1 * 2.0) / 8),
        ("qlora", (7 * 0.5 + 1 * 2.0) / 8),
        ("full", 16.0),
        ("full_8bit_adam", 10.0),
        ("full_adafactor", 8.0),
        ("device_map_disk", 0.0),
        ("zero3_offload", 0.0),
        ("ddp_2", 0.0),
    ],
)
def test_the_least_that_a_path_needs(name, bytes_per_weight):
    assert least_bytes(BY_NAME[name], EIGHT_BILLION) == pytest.approx(bytes_per_weight * 8e9)


@pytest.mark.parametrize(("name", "gb"), [("lora", 16), ("lora_bf16_weights", 16), ("qlora", 5.5), ("full", 128)])
def test_a_model_that_is_stored_in_half_precision_needs_less(name, gb):
    stored = WeightCounts(weights=8_000_000_000, linear_weights=7_000_000_000, stored_bytes=2.0)
    assert least_bytes(BY_NAME[name], stored) == pytest.approx(gb * 1e9)


def test_every_reference_of_a_bound_stands_in_the_table():
    for variant in VARIANTS:
        assert variant.peak_at_most is None or variant.peak_at_most[0] in BY_NAME, variant.name
        assert variant.tuning in variant.flags or "qlora" in variant.flags, variant.name
