"""What a run achieved, in figures (scu_metrics.json) and in a table."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from rich.console import Console
from rich.table import Table

from scu_trainer.control.tracking import assess
from scu_trainer.run_files import read_rows
from scu_trainer.train.callbacks import HISTORY_FILE
from scu_trainer.train.evaluate import (
    DocumentScores,
    bootstrap_accuracy,
    bootstrap_accuracy_difference,
    bootstrap_bpt,
    bootstrap_difference,
)
from scu_trainer.train.memory_loop import MemoryLoop
from scu_trainer.train.suspects import SUSPECTS_FILE
from scu_trainer.train.throughput import throughput_lines


def held_out_figures(before: Optional[DocumentScores], after: Optional[DocumentScores]) -> dict[str, Any]:
    """Bits per token before and after with 95 % bootstrap intervals over documents, and their paired difference; of
    classifiers (bits per label, over samples) the accuracy too."""
    if before is None or after is None:
        return {"held_out_documents": 0}
    accuracy = {}
    if after.correct is not None:
        accuracy = {
            "held_out_accuracy_before": asdict(bootstrap_accuracy(before)),
            "held_out_accuracy_after": asdict(bootstrap_accuracy(after)),
            "held_out_accuracy_change": asdict(bootstrap_accuracy_difference(before, after)),
        }
    return {
        **accuracy,
        "held_out_documents": len(before.tokens),
        "held_out_tokens": int(before.tokens.sum()),
        "held_out_bpt_before": asdict(bootstrap_bpt(before)),
        "held_out_bpt_after": asdict(bootstrap_bpt(after)),
        "held_out_bpt_change": asdict(bootstrap_difference(before, after)),
    }


def best_held_out(log_history: list[dict[str, Any]]) -> Optional[dict[str, Any]]:
    """The best of the evaluations of the run, with its step: the highest accuracy, else the lowest bits per token."""
    evaluations = [entry for entry in log_history if math.isfinite(entry.get("eval_bpt", math.nan))]
    if not evaluations:
        return None
    best = min(evaluations, key=lambda entry: (-entry.get("eval_accuracy", 0.0), entry["eval_bpt"]))
    accuracy = {"accuracy": best["eval_accuracy"]} if "eval_accuracy" in best else {}
    return {"step": best["step"], "bpt": best["eval_bpt"], **accuracy}


def regularization_figures(output_dir: Path, regularizer, seconds_in_loop: float, train_s: float) -> dict[str, Any]:
    """Tracking of S over the steps with the final target, and what the loop cost."""
    rows = read_rows(output_dir / HISTORY_FILE)
    figures: dict[str, Any] = {
        "law": regularizer.settings.law,
        "plant_gain": regularizer.progress.gain,
        "skipped_measurements": regularizer.state.skipped,
        "overhead_fraction": seconds_in_loop / train_s if train_s > 0 else None,
        "notices": list(regularizer.progress.notices),
    }
    target = regularizer.state.target_s
    if not rows:
        return {**figures, "verdict": "no control step was taken"}
    figures.update(final_s=rows[-1]["s_ema"], final_lambda=rows[-1]["lambda"], target_s=target)
    figures["reached_step"] = regularizer.state.reached_step
    return {**figures, **_tracking(regularizer, rows, target)}


def _tracking(regularizer, rows: list[dict[str, Any]], target: Optional[float]) -> dict[str, Any]:
    if target is None:
        return {"verdict": "held-out loss was still falling at the end: S was left free"}
    if regularizer.settings.law in ("fixed", "schedule"):
        return {"verdict": f"lambda was {regularizer.settings.law}, S was not controlled"}
    held = [row for row in rows if row["s_target"] == target and row["s_ema"] is not None]
    if regularizer.settings.stop_at_target and not regularizer.settings.hold_steps:
        reached = regularizer.state.reached_step
        return {"verdict": f"stopped at target, step {reached}" if reached else "target not reached"}
    tracking = assess(
        [row["step"] for row in held], [row["s_ema"] for row in held], target, [row["saturated"] for row in held]
    )
    return asdict(tracking)


def memory_figures(loop: MemoryLoop) -> dict[str, Any]:
    """Tokens processed per real one, against the stock order of operations, and what memory did to the chunks."""
    books = loop.books
    real = max(1, books.real_tokens)
    return {
        **asdict(books),
        "processed_per_real": books.processed_tokens / real,
        "stock_per_real": books.stock_tokens / real,
        "final_cap_tokens": loop.state.cap_tokens,
    }


def print_table(console: Console, figures: dict[str, Any], output_dir: Path, trained: str) -> None:
    """The last thing a person sees: results, where the files are, what to type next."""
    table = Table(title=trained, title_justify="left", show_header=False, pad_edge=False)
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, value in [
        *_held_out_lines(figures),
        *_control_lines(figures.get("regularization")),
        *_memory_lines(figures.get("memory")),
        *_curriculum_lines(figures.get("curriculum")),
        *throughput_lines(figures.get("throughput")),
    ]:
        table.add_row(name, value)
    table.add_row("files", str(output_dir))
    console.print(table)
    against = " --against base" if figures["has_base"] else ""
    console.print(f"next: scu-trainer eval {output_dir}{against}", soft_wrap=True)
    console.print(f"      scu-trainer report {output_dir}", soft_wrap=True)
    if (output_dir / "logs" / "tensorboard").is_dir():
        console.print(f"      tensorboard --logdir {output_dir}/logs/tensorboard", soft_wrap=True)


def _held_out_lines(figures: dict[str, Any]) -> list[tuple[str, str]]:
    unit = figures.get("unit", "token")
    if not figures["held_out_documents"]:
        return [(f"held-out bits per {unit}", "nothing was held out")]
    documents, tokens = figures["held_out_documents"], figures["held_out_tokens"]
    held_out = f"{documents:,} {figures.get('item', 'document')}s"
    if "held_out_accuracy_after" in figures:
        return [*_accuracy_lines(figures), _bits_line(figures, unit), ("held out", held_out)]
    lines = [_bits_line(figures, unit), ("change, 95 % interval", _change(figures["held_out_bpt_change"], "+.3f"))]
    best = figures.get("best_held_out")
    if best and best["bpt"] < figures["held_out_bpt_after"]["value"] - 1e-4:
        lines.append(("best on the way", f"{best['bpt']:.3f} at step {best['step']}"))
    return [*lines, ("held out", f"{held_out}, {tokens:,} {unit}s")]


def _bits_line(figures: dict[str, Any], unit: str) -> tuple[str, str]:
    before, after = (figures[f"held_out_bpt_{when}"]["value"] for when in ("before", "after"))
    return f"held-out bits per {unit}", f"{before:.3f} before, {after:.3f} after"


def _accuracy_lines(figures: dict[str, Any]) -> list[tuple[str, str]]:
    before, after = (figures[f"held_out_accuracy_{when}"] for when in ("before", "after"))
    lines = [
        ("held-out accuracy", f"{before['value']:.1%} before, {after['value']:.1%} after"),
        ("95 % interval", f"{after['low']:.1%} to {after['high']:.1%}"),
    ]
    best = figures.get("best_held_out")
    if best and best["accuracy"] > after["value"] + 1e-9:
        lines.append(("best on the way", f"{best['accuracy']:.1%} at step {best['step']}"))
    return lines


def _change(change: dict[str, float], style: str) -> str:
    return f"{change['value']:{style}} ({change['low']:{style}} to {change['high']:{style}})"


def _memory_lines(memory: Optional[dict[str, Any]]) -> list[tuple[str, str]]:
    if memory is None:
        return []
    lines = []
    if memory["stock_per_real"] > memory["processed_per_real"] + 0.005:
        lines.append(
            (
                "tokens processed per real one",
                f"{memory['processed_per_real']:.2f} (as delivered: {memory['stock_per_real']:.2f})",
            )
        )
    if memory["out_of_memory"] or memory["changes"]:
        cap = memory["final_cap_tokens"]
        lines.append(
            (
                "memory",
                f"{memory['changes']} changes of the chunk, at the end "
                f"{'unrestricted' if cap is None else f'{cap:,} tokens'}; out of memory and recovered: "
                f"{memory['out_of_memory']}",
            )
        )
    return lines


def _curriculum_lines(curriculum: Optional[dict[str, Any]]) -> list[tuple[str, str]]:
    if curriculum is None:
        return []
    lines = []
    if curriculum["curriculum"] != "none":
        name, rows, uniform = curriculum["curriculum"], curriculum["rows"], max(1, curriculum["uniform_rows"])
        tokens = curriculum["padded_tokens"] / max(1, curriculum["real_tokens"])
        share = f"{rows:,} rows seen ({rows / uniform:.2f} of uniform), {tokens:.2f} tokens per real one"
        lines.append(("curriculum", f"{name}: {share}"))
    if curriculum["suspects"]:
        lines.append(("suspect rows", f"{curriculum['suspects']:,} of {curriculum['samples']:,}: {SUSPECTS_FILE}"))
    if curriculum["quarantined"]:
        lines.append(("quarantined rows", f"{curriculum['quarantined']:,}: their loss was no finite number"))
    return lines


def _control_lines(control: Optional[dict[str, Any]]) -> list[tuple[str, str]]:
    if control is None:
        return [("SCU", "off")]
    target = control.get("target_s")
    against = (
        f"{control.get('final_s') or 0:.4f} against {target:.4g}" if target else f"{control.get('final_s') or 0:.4f}"
    )
    lines = [("S against target", f"{against}: {control['verdict']}")]
    if control.get("settling_step") is not None:
        detail = f"settled at step {control['settling_step']}, bias {control['bias']:+.1%}"
        if control["overshoot"] is not None:
            detail += f", overshoot {max(0.0, control['overshoot']):.1%}"
        lines.append(("tracking", detail))
    lines.append(("lambda at the end", f"{control.get('final_lambda') or 0:.4g}"))
    if control["overhead_fraction"] is not None:
        lines.append(("cost of the loop", f"{control['overhead_fraction']:.2%} of the time of training"))
    return lines + [("note", text) for text in control["notices"]]
