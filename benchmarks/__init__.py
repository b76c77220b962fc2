"""Benchmarks of the project. The first lines of each script say what it measures and how to start it.

    headline/   the claims of the README and the docs: comparison with stock and TRL, memory, speed, start-up, recipes,
                predictions; ``regressions.py`` reports what changed since the stored results
    loops/      the cost and the effect of single loops, checks and test campaigns
    gpu/        benchmarks for a CUDA device, or of what would cost time on one
    studies/    questions that were asked once: other families, limits, scaling; ``same_runs.py`` compares the runs of
                two versions of the project
    lib/        code that the scripts share
    results/    a dated file for each benchmark, with the command that wrote it

Start a script with ``python benchmarks/FOLDER/NAME.py``. The same line in each script puts the repository first on the
import path, so that it finds ``benchmarks.lib`` and measures the package in this repository.
"""

import logging

# During import, torchao and bitsandbytes search for kernels of other machines, and torch warns about what torchao
# registers. That would print long lines from each process before the output of the benchmark.
for _noisy in ("torchao", "torch.utils._pytree", "bitsandbytes"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
