"""The process of one point of benchmarks/gpu/gpu.py: python benchmarks/gpu/gpu_point.py POINT ANSWER

POINT: fields of ``gpu_work.Point`` as JSON; ANSWER: the file that its numbers are written to. A process of its own per
point, because peaks, caches and what libraries change in each other must not pass from one contender to the next.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    fields = json.loads(sys.argv[1])
    if fields["contender"] == "unsloth":
        import unsloth  # noqa: F401  it changes transformers, which must not be loaded before
    from benchmarks.gpu.gpu_work import Point, result_of

    Path(sys.argv[2]).write_text(json.dumps(result_of(Point(**fields))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
