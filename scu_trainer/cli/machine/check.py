"""``scu-trainer hardware check`` and ``scu-trainer train --check_requirements``: can this recipe run here?"""

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
from scu_trainer.models.asking import switches_kept
from scu_trainer.models.loading.names import check_source
from scu_trainer.train.run_directory.logs import run_log


def check_recipe(config: Optional[str], flags: Sequence[str]) -> int:
    """Print one line for each requirement of the recipe, which counts as required. Returns 2 if one is not met.

    Raises SettingsError for a recipe that cannot be read, or that contradicts itself where all requirements are met.
    """
    from scu_trainer.data import default_cache_dir

    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        # They know the fields of a recipe, and that they are missing is then the thing to say.
        print(render(check(Path("runs"), default_cache_dir(None))))
        return 2
    with run_log(), switches_kept():  # what libraries say while they are loaded, as in train
        findings = findings_of(configuration.read_values(config, flags))
        print(render(findings))
        if not all_required_met(findings):
            return 2
        configuration.read_job(config, flags).check()
    return 0


def render(findings: Sequence[RequirementStatus]) -> str:
    """The findings as a table of 80 columns, without colours: it also goes into logs and bug reports."""
    if importlib.util.find_spec("rich") is None:
        return "\n".join(f"{_mark(finding)}: {finding.name} {finding.found}; {finding.fix}" for finding in findings)
    rows = [[_mark(one), one.name, one.found, one.wanted if one.ok else f"{one.wanted}: {one.fix}"] for one in findings]
    titles = ("", "requirement", "found", "wanted, or what to do")
    table = figures_table(titles, rows, left=titles, framed=False)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    table.columns[2].max_width = 27
    return rendered(table)


def _mark(finding: RequirementStatus) -> str:
    if finding.ok:
        return "ok"
    return "FIX" if finding.required else "opt"


def findings_of(values: dict[str, Any]) -> list[RequirementStatus]:
    """``values``: every field of the command line."""
    from scu_trainer.data import default_cache_dir

    output_dir = Path(values["output_dir"]).expanduser()
    found = check(output_dir, default_cache_dir(values["cache_dir"]), needs_of(values))
    known = f"one of {', '.join(REPORTERS)}"
    unknown = [name for name in reporters_of(values) if name not in REPORTERS]
    found += [RequirementStatus("report_to", False, name, "a known service", known) for name in unknown]
    name = values["model_name_or_path"]
    return found if name is None else [*found, _model(name)]


def _model(name: str) -> RequirementStatus:
    try:
        check_source(name)
    except ModelError as error:
        return RequirementStatus("model", False, name, "a model", str(error))
    is_here = Path(name).expanduser().is_dir()
    return RequirementStatus(
        "model", True, name, "a model" if is_here else "a Hub id; the Hub was not asked for it", ""
    )
