"""What an export needs, asked before anything is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from scu_trainer.errors import RequirementError


def require_packages(purpose: str, extra: str, modules: Sequence[str]) -> None:
    """Raises RequirementError that names the extra of ours which installs ``modules``."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise RequirementError(
            f"{purpose} needs {' and '.join(absent)}, not installed here; pip install 'scu-trainer[{extra}]'"
        )
