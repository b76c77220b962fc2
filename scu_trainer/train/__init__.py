"""Training: the Trainer subclass, the actuators, the run directory. Start in ``trainer.py``."""
