"""How a loss adds up over the rows of a batch: known, asked and audited, in one place for all loops.

reduction.py    the reduction: what the loss divides by, whether a split is exact, whether padding may go
known.py        public loss functions, by identity of the function that is called
trials.py       every other loss: a few rows together and alone, in training mode without noise
measuring.py    what is compared: the loss of some rows and its gradient, and how wholes follow from parts
audit.py        while training: a real batch as a whole against the sum over its micro-batches
no_trace.py     what asking changes is put back
frozen_weights.py  weights that no optimizer moves: who writes to them, and what they were before
own_draws.py    numbers that code of somebody's own draws once per batch
own_step.py     a training_step of somebody's own, and counters, which count micro-batches
analysis.py     one trainer's: when to ask again, when to audit, what to say
"""

from scu_trainer.train.loss.analysis.measuring import EXACT, ROUGH, tolerance
from scu_trainer.train.loss.analysis.no_trace import has_drawn, rng_state, untouched
from scu_trainer.train.loss.analysis.trials import analyze, mixing_modules

__all__ = ["EXACT", "ROUGH", "analyze", "has_drawn", "mixing_modules", "rng_state", "tolerance", "untouched"]
