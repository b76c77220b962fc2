"""``scu-trainer hardware check`` and ``train --check_requirements``: checks whether a recipe can run here."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli import configuration
from scu_trainer.cli.main import figures_table
from scu_trainer.cli.planning.screen import rendered
from scu_trainer.errors import ModelError
from scu_trainer.hardware.needs import REPORTERS, needs_of, reporters_of
from scu_trainer.hardware.requirements import RequirementStatus, all_required_met, check
from scu_trainer.models.asking import torch_switches_restored
from scu_trainer.models.loading.names import check_source
from scu_trainer.train.run_directory.logs import run_log


def check_recipe(config: Optional[str], flags: Sequence[str]) -> int:
    """Print a line for each requirement of the recipe. Returns 2 if one is not met, otherwise 0. Raises SettingsError
    for a recipe that cannot be read, or, if all requirements are met, for one that contradicts itself."""
    from scu_trainer.data import default_cache_dir

    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        # Without them the fields of a recipe are unknown, so only report that they are missing.
        print(render(check(Path("runs"), default_cache_dir(None))))
        return 2
    with run_log(), torch_switches_restored():  # for messages of libraries while they are loaded, as in train
        findings = findings_of(configuration.read_values(config, flags))
        print(render(findings))
        if not all_required_met(findings):
            return 2
        with configuration.naming_file(config, flags):
            configuration.read_job(config, flags).check()
    return 0


def render(findings: Sequence[RequirementStatus]) -> str:
    """Return the findings as a table of 80 columns without colors, because it is also used in logs and bug reports."""
    if importlib.util.find_spec("rich") is None:
        return "\n".join(f"{_status(item)}: {item.name} {item.found}; {item.fix}" for item in findings)
    rows = [
        [_status(item), item.name, item.found, item.wanted if item.ok else f"{item.wanted}: {item.fix}"]
        for item in findings
    ]
    titles = ("", "requirement", "found", "wanted, or what to do")
    table = figures_table(titles, rows, left=titles, framed=False)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    table.columns[2].max_width = 27
    return rendered(table)


def _status(finding: RequirementStatus) -> str:
    if finding.ok:
        return "ok"
    return "FIX" if finding.required else "opt"


def findings_of(values: dict[str, Any]) -> list[RequirementStatus]:
    """Check the requirements of a recipe. ``values``: all fields of the command line."""
    from scu_trainer.data import default_cache_dir

    output_dir = Path(values["output_dir"]).expanduser()
    statuses = check(output_dir, default_cache_dir(values["cache_dir"]), needs_of(values))
    known = f"one of {', '.join(REPORTERS)}"
    unknown = [name for name in reporters_of(values) if name not in REPORTERS]
    statuses += [RequirementStatus("report_to", False, name, "a known service", known) for name in unknown]
    name = values["model_name_or_path"]
    return statuses if name is None else [*statuses, _check_model(name)]


def _check_model(name: str) -> RequirementStatus:
    try:
        check_source(name)
    except ModelError as error:
        return RequirementStatus("model", False, name, "a model", str(error))
    is_here = Path(name).expanduser().is_dir()
    return RequirementStatus(
        "model", True, name, "a model" if is_here else "a Hub id; whether it exists there was not checked", ""
    )
