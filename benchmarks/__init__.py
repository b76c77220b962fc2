"""Measurements of the project: each script says in its first lines what it asks and how it is called.

    headline/   what the README and the pages claim: against stock and TRL, memory, speed, start, recipes, predictions;
                ``regressions.py`` says what moved since the results
    loops/      what one loop, check or campaign costs or does
    gpu/        what is meant for a CUDA device, or asks what would cost time on one
    studies/    questions asked once: other families, limits, scaling; ``same_runs.py`` holds the runs
                of two states of the project against each other
    lib/        what the scripts share
    results/    a dated file of each benchmark, with the command that gave it

A script is started as ``python benchmarks/FOLDER/NAME.py``. One line, the same in all, puts the repository in front of
the path of imports: it finds ``benchmarks.lib``, and measures the package beside it.
"""

import logging

# As they are imported, torchao and bitsandbytes look for kernels of other machines and torch warns of what torchao
# registers: long lines from each process, before the first that a benchmark has to say.
for _talkative in ("torchao", "torch.utils._pytree", "bitsandbytes"):
    logging.getLogger(_talkative).setLevel(logging.ERROR)
