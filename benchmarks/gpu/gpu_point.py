"""The process of one point of benchmarks/gpu/gpu.py: python benchmarks/gpu/gpu_point.py POINT ANSWER

POINT: the fields of ``gpu_work.Point`` as JSON. ANSWER: the file that the results are written to. Each point has its
own process, so that peaks, caches and patches of libraries do not affect the next contender.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    fields = json.loads(sys.argv[1])
    if fields["contender"] == "unsloth":
        import unsloth  # noqa: F401  it patches transformers, which must not be imported before
    from benchmarks.gpu.gpu_work import Point, result_of

    Path(sys.argv[2]).write_text(json.dumps(result_of(Point(**fields))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
