"""How a loss adds up over the rows of a batch: known, found by trials, and audited, in one place for all loops.

reduction.py    the reduction: what the loss is divided by, whether a split is exact, whether padding may be removed
known.py        public loss functions, recognized by identity when they are called
trials.py       all other losses: a few rows together and one by one, in training mode without noise
measuring.py    what is compared: the loss of some rows and its gradient
audit.py        during training: a real batch as a whole, compared with the sum over its micro-batches
no_trace.py     restores everything that a trial changes
frozen_weights.py  weights that no optimizer trains: who writes to them, and their old values
own_draws.py    random numbers that user code draws once per batch
own_step.py     a user's own training_step, and counters that would count micro-batches
analysis.py     for one trainer: when to run trials and audits, and what to report
"""

from scu_trainer.train.loss.analysis.measuring import EXACT, ROUGH, tolerance
from scu_trainer.train.loss.analysis.no_trace import has_drawn, restored_on_exit, rng_state
from scu_trainer.train.loss.analysis.trials import analyze, mixing_modules

__all__ = ["EXACT", "ROUGH", "analyze", "has_drawn", "mixing_modules", "restored_on_exit", "rng_state", "tolerance"]
