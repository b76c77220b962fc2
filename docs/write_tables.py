"""Writes the tables and figures of the pages from benchmarks/results/:

    README.md          front_door.json: what `make train` prints; and with docs/measured.md, docs/faq.md, docs/guide.md
                       every figure in a sentence that docs/figures.py declares
    docs/paths.md      variants.json: what a path costs, which loops act in it
    docs/families.md   recipes.json and families.json: what the recipes reach, and how fast
    docs/plan.md       memory_estimate.json: predicted against measured memory
    docs/compare.md    compare.json, compare_one_set.json: controllers against each other at equal tokens, over seeds
                       that learn other documents, and over seeds that share them
    docs/retain.md     retention.json: budgets held, and rivals at equal forgetting
    docs/search.md     find_rate.json: learning rates by short trainings
    docs/regularization.md  early_stop.json: S as a stopping signal
    docs/benchmarks.md each file of the suite that has a place there, against what people would use instead

    make test-smoke ARGS="--json benchmarks/results/variants.json"
    python benchmarks/headline/recipes.py && python benchmarks/studies/families.py
    python benchmarks/headline/memory_estimate.py
    python scripts/compare_controllers.py --config recipes/compare.yaml --output_dir runs/compare
    cp runs/compare/comparison.json benchmarks/results/compare.json
    python scripts/compare_controllers.py --config recipes/compare.yaml --data_seed 0 --seeds 0 1 2 3 4 5 \
        --reference model --output_dir runs/compare-one-set
    cp runs/compare-one-set/comparison.json benchmarks/results/compare_one_set.json
    python benchmarks/studies/retention.py && python benchmarks/studies/find_rate.py
    python benchmarks/loops/early_stop.py --seeds 0 1 2 --steps 100
    python benchmarks/headline/overhead.py, and what else docs/benchmarks.md names
    python benchmarks/headline/front_door.py --picture docs/images/run.png
    python docs/write_tables.py

A table stands between two comments that name it; everything else in the page is left alone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.variants import rows_of
from scu_trainer.report.comparison import text as comparison_text
from scu_trainer.runs.studies.variant_table import BY_NAME, LOOPS
from scu_trainer.runs.studies.variants import VariantResult

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.lib.outcome import Figure  # noqa: E402 - a folder of scripts, which nobody installs
from docs import figures  # noqa: E402

PAGE, RESULTS = ROOT / "docs" / "paths.md", ROOT / "benchmarks" / "results" / "variants.json"
FAMILIES_PAGE, PLAN_PAGE = ROOT / "docs" / "families.md", ROOT / "docs" / "plan.md"
COMPARE_PAGE, BENCHMARKS_PAGE = ROOT / "docs" / "compare.md", ROOT / "docs" / "benchmarks.md"
RETAIN_PAGE, SEARCH_PAGE = ROOT / "docs" / "retain.md", ROOT / "docs" / "search.md"
REGULARIZATION_PAGE = ROOT / "docs" / "regularization.md"
STOPS = {"effective": "S effective = 0.1", "factors": "S factors = 0.1", "passes": "6 passes", "end": "to the end"}
CELLS = {"acts": "acts", "refused": "refused", "idle": "idle", "off": "off"}


def tables(record: dict[str, Any]) -> dict[str, str]:
    """Markdown by the name of the table. ``record``: content of the results file."""
    outcomes = [VariantResult(**outcome) for outcome in record["outcomes"]]
    return {"costs": _costs(outcomes), "loops": _loops(outcomes), "elsewhere": _elsewhere(outcomes)}


def _costs(outcomes: list[VariantResult]) -> str:
    heads = ("path", "saves", "peak memory (ratio)", "step time ratio", "held-out bits per token")
    rows = [(f"`{row[0]}`", BY_NAME[row[0]].saves, *row[1:4]) for row in rows_of(outcomes)]
    return markdown(heads, rows)


def _loops(outcomes: list[VariantResult]) -> str:
    ran = [outcome for outcome in outcomes if outcome.status == "ran"]
    rows = [(f"`{outcome.name}`", *(CELLS[outcome.loops[loop]] for loop in LOOPS)) for outcome in ran]
    return markdown(("path", *LOOPS), rows)


def _elsewhere(outcomes: list[VariantResult]) -> str:
    rows = [(f"`{outcome.name}`", outcome.message) for outcome in outcomes if outcome.status == "missing"]
    return markdown(("path", "not run here"), rows)


def family_tables(recipes: dict[str, Any], families: dict[str, Any]) -> dict[str, str]:
    """The same for docs/families.md."""
    return {"recipes": _recipes(recipes["results"]), "speed": _speed(families["results"])}


def _recipes(results: list[dict[str, Any]]) -> str:
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        alone = f", {result['branch']} alone" if result["branch"] else ""
        groups.setdefault(f"`{result['recipe']}`{alone}", []).append(result)
    rows = [
        (
            name,
            _joined(group, "{:.1f} %", "accuracy", 100) or _joined(group, "perplexity {:.1f}", "perplexity"),
            _joined(group, "{:.1f}", "kneser_ney"),
            _joined(group, "{:.3f}", "final_s") or "off",
        )
        for name, group in ((name, sorted(group, key=lambda r: r["seed"])) for name, group in groups.items())
    ]
    return markdown(("recipe", "held out, by seed", "Kneser-Ney bigrams", "S at the end"), rows)


def _joined(group: list[dict[str, Any]], style: str, key: str, factor: float = 1) -> str:
    return ", ".join(style.format(factor * result[key]) for result in group if result.get(key) is not None)


def _speed(results: list[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        scores = r["held_out_accuracy"] or r["held_out_bpt"]
        style, factor = ("{:.1f} %", 100) if r["held_out_accuracy"] else ("{:.3f} bits", 1)
        contenders = (
            "all contenders float32" if r["group"] == "equal" else f"ours as the recipe ({r['mixed_precision']})"
        )
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in r["speed_against"].items())
        order = [*r["speed_against"], "ours"]
        held_out = ", ".join(f"{name} {style.format(factor * scores[name])}" for name in order)
        rows.append((f"`{r['recipe']}`", contenders, ratios, held_out))
    return markdown(
        ("recipe", "contenders", "steps per second of ours, as a ratio to", "held out after as many steps"), rows
    )


def estimate_tables(record: dict[str, Any]) -> dict[str, str]:
    """The same for docs/plan.md. ``record``: of benchmarks/headline/memory_estimate.py."""
    heads = ("training", "measured MiB", "noise", "predicted MiB", "error")
    found = [result for result in record["results"] if result["device"] == "cpu"]
    rows = [
        (
            result["name"],
            _mib(result["measured_bytes"]),
            f"{result['noise']:.1%}",
            _mib(result["predicted_bytes"]),
            f"{result['error']:+.1%}",
        )
        for result in sorted(found, key=lambda result: -abs(result["error"]))
    ]
    return {"estimate": markdown(heads, rows)}


def comparison_tables(*records: dict[str, Any]) -> dict[str, str]:
    """The same for docs/compare.md: of seeds that learn other documents, and of seeds that share them."""
    of_each = zip(("", "_one_set"), map(_of_comparison, records), strict=True)
    return {f"{name}{suffix}": table for suffix, found in of_each for name, table in found.items()}


def _of_comparison(record: dict[str, Any]) -> dict[str, str]:
    """``record``: comparison.json."""
    notes = "\n".join(f"- {note}" for note in record["notes"])
    cost = comparison_text.cost_line(record)
    return {
        "budget": f"`{record['command']}`: {comparison_text.budget_line(record)}.",
        "comparison": comparison_text.markdown_table(record) + (f"\n\n{cost.capitalize()}." if cost else ""),
        "verdicts": "\n\n".join(
            [markdown(("arm", "verdict"), comparison_text.verdicts(record)), record["verdict"], notes]
        ),
    }


def readme_tables(record: dict[str, Any]) -> dict[str, str]:
    """The same for README.md: what the main job says in the end."""
    return {"main_job": "\n".join(["```", *record["job"]["said"], "```"])}


def retention_tables(record: dict[str, Any]) -> dict[str, str]:
    """The same for docs/retain.md: the study brings its tables."""
    return {
        name: markdown(tuple(table["heads"]), [tuple(row) for row in table["rows"]])
        for name, table in record["tables"].items()
    }


def rate_tables(record: dict[str, Any]) -> dict[str, str]:
    """The same for docs/search.md: what beats the limit is in bold."""
    heads, rows = record["table"]["heads"], record["table"]["rows"]
    first = heads.index("quarter")

    def losses(row: list[str]) -> list[str]:
        texts = [f"{float(cell):.3f}" for cell in row[first:]]
        return [f"**{text}**" if float(text) > record["most_nats"] else text for text in texts]

    shown = [(row[0], *(f"{float(rate):.3g}" for rate in row[2:4]), *losses(row)) for row in rows]
    return {"find_rate": markdown(("job", *heads[2:4], *heads[first:]), shown)}


def stop_tables(record: dict[str, Any]) -> dict[str, str]:
    """The same for docs/regularization.md: means over the seeds of a condition, and over the conditions of a seed."""
    results = record["results"]
    conditions, seeds = (dict.fromkeys(one[key] for one in results) for key in ("condition", "seed"))
    rows = [_stops(name, [one for one in results if one["condition"] == name]) for name in conditions]
    rows += [_stops(f"all, seed {seed}", [one for one in results if one["seed"] == seed]) for seed in seeds]
    return {"early_stop": markdown(("condition", *STOPS.values()), [*rows, _stops("**all**", results)])}


def _stops(name: str, results: list[dict[str, Any]]) -> tuple[str, ...]:
    return (name.replace(" x ", " × "), *(_stop([one["excess"][rule] for one in results]) for rule in STOPS))


def _stop(excesses: list[Optional[float]]) -> str:
    """Mean and worst of those that stopped."""
    found = [excess for excess in excesses if excess is not None]
    never = f"{len(excesses) - len(found)} of {len(excesses)} never" if len(found) < len(excesses) else ""
    figures = f"{sum(found) / len(found):.3f} ({max(found):.3f})" if found else ""
    return ", ".join(filter(None, (figures, never)))


def suite_tables(*records: dict[str, Any]) -> dict[str, str]:
    """The same for docs/benchmarks.md: each benchmark of the suite brings its table and its figures."""
    return {record["benchmark"]: _of_suite(record) for record in records}


def _of_suite(record: dict[str, Any]) -> str:
    table = markdown(tuple(record["table"]["heads"]), [tuple(row) for row in record["table"]["rows"]])
    aims = [_aim(name, figure) for name, figure in record["figures"].items() if figure["target"] is not None]
    return "\n\n".join([_source(record), table, *(["\n".join(aims)] if aims else [])])


def _aim(name: str, figure: dict[str, Any]) -> str:
    one = Figure(**figure)
    return f"- {name}: **{one.value:.3g}** ({one.aim}: {'met' if one.is_met else 'missed'})"


def _source(record: dict[str, Any]) -> str:
    """Command, date, machine and versions of a results file in a line."""
    names = ("torch", "transformers", "trl")
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in names if name in record["versions"])
    machine, repeats = record["machine"], record["repeats"]
    device = f"{machine['cores']} cores, {machine['ram_gib']} GiB"
    times = "taken once" if repeats == 1 else f"medians of {repeats}"
    return f"`{record['command']}`, {record['date']}, {record.get('device', device)}, {versions}; {times}."


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f}"


def markdown(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def written(page: str, found: dict[str, str]) -> str:
    """``page`` with each table in its place. Raises KeyError for a place whose table nobody makes."""

    def put(match: re.Match) -> str:
        return f"{match[1]}\n{found[match[2]]}\n{match[4]}"

    return re.sub(r"(<!-- table (\w+) -->)\n(.*?)(<!-- end -->)", put, page, flags=re.DOTALL)


def suite_names() -> tuple[str, ...]:
    """Results files that bring their own table, in the order of the page."""
    named = re.findall(r"<!-- table (\w+) -->", BENCHMARKS_PAGE.read_text())
    return tuple(dict.fromkeys(named))


PAGES = (
    (ROOT / "README.md", readme_tables, ("front_door",)),
    (PAGE, tables, ("variants",)),
    (FAMILIES_PAGE, family_tables, ("recipes", "families")),
    (PLAN_PAGE, estimate_tables, ("memory_estimate",)),
    (COMPARE_PAGE, comparison_tables, ("compare", "compare_one_set")),
    (RETAIN_PAGE, retention_tables, ("retention",)),
    (SEARCH_PAGE, rate_tables, ("find_rate",)),
    (REGULARIZATION_PAGE, stop_tables, ("early_stop",)),
    (BENCHMARKS_PAGE, suite_tables, suite_names()),
)
"""Page, what makes its tables, and the results files that this takes."""

if __name__ == "__main__":
    for page, make, names in PAGES:
        records = [json.loads((RESULTS.parent / f"{name}.json").read_text()) for name in names]
        page.write_text(written(page.read_text(), make(*records)))
    for page in figures.PAGES:
        page.write_text(figures.written(page.read_text(), figures.Results()))
    changed = dict.fromkeys([*(page for page, *_ in PAGES), *figures.PAGES])
    print("written: " + ", ".join(str(page.relative_to(ROOT)) for page in changed))
