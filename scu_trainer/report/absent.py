"""Explain why a plot of a run is missing. The report shows the explanation instead of the plot."""

from __future__ import annotations

from scu_trainer.report.files import LOG_FILE, RunFiles, points

SCORES = ("eval_bpt", "eval_loss")


def why_no_log(run: RunFiles) -> str:
    """Return why a run has no log rows."""
    if run.has_torn_logs:
        return f"{LOG_FILE} holds no complete row: it is torn, or is not a log"
    if run.is_alive or run.state in ("queued", "starting"):
        return "nothing has been logged yet"
    return "it ended before its first log"


def why_no_row(run: RunFiles) -> str:
    """Return why no training step was logged; "" if one was."""
    if not run.logs or _is_logged(run, "loss"):
        return ""
    interval = run.settings.get("logging_steps")
    return "no training step was logged" + (f" (logging_steps: {interval:g})" if interval else "")


def why_half_a_loss(run: RunFiles) -> str:
    """Return why a run has only a training loss or only evaluations to draw; "" if it has both, or neither. The reason
    may also be that its logs are torn, or that all values are NaN."""
    if run.has_torn_logs:
        return why_no_log(run)
    kinds = (("training loss", ("loss",)), ("score of an evaluation", SCORES))
    not_finite = [kind for kind, names in kinds if _is_logged(run, *names) and not _is_drawn(run, *names)]
    if not_finite:
        return f"no {' and no '.join(not_finite)} in its logs is finite"
    is_trained, is_evaluated = _is_drawn(run, "loss") or bool(run.control), _is_drawn(run, *SCORES)
    if is_trained == is_evaluated:
        return ""
    if is_evaluated:
        return why_no_row(run)
    strategy = f" (eval_strategy: {run.settings['eval_strategy']})" if "eval_strategy" in run.settings else ""
    subject = "scores of intermediate steps, because there was " if run.metrics.get("held_out_bpt_before") else ""
    return f"{subject}no evaluation {'yet' if run.is_alive else 'during training'}{strategy}"


def _is_logged(run: RunFiles, *names: str) -> bool:
    return any(name in row for row in run.logs for name in names)


def _is_drawn(run: RunFiles, *names: str) -> bool:
    return any(points(run.logs, name)[0] for name in names)


def why_no_loss(run: RunFiles) -> str:
    if run.logs:
        return why_no_row(run) or "its logs have no finite number for these figures"
    return why_no_log(run)


def why_no_s(run: RunFiles) -> str:
    if run.settings.get("scu") is False:
        return "regularization was off (scu: false)"
    if (run.metrics.get("regularization") or {}).get("verdict") == "not measured":
        return "S could not be measured (see the notices)"
    return (
        "no control step has been taken yet"
        if run.is_alive
        else "it has no scu_history.json with rows: no control step was taken, or regularization was off"
    )


def why_no_memory(run: RunFiles) -> str:
    if run.settings.get("memory_control") is False:
        return "the memory loop was off (memory_control: false)"
    if run.is_alive or not run.logs:
        return why_no_log(run)
    return why_no_row(run) or "its files have no memory rows: the micro-batch never changed, and no memory was logged"


def why_no_throughput(run: RunFiles) -> str:
    if not run.logs:
        return why_no_log(run)
    return why_no_row(run) or "its logs have no rows or tokens per second"


def why_no_curriculum(run: RunFiles) -> str:
    if run.is_alive or run.state in ("queued", "starting"):
        return "no epoch has been recorded yet"
    return "it has no curriculum.json with rows: no epoch was recorded, or no statistics were kept"
