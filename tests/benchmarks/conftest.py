"""The benchmarks are scripts that import each other by name, as ``python benchmarks/NAME.py`` finds them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
