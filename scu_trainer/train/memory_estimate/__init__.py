"""Prediction of the memory of a training step from shapes: the step runs once on fake tensors, which have no data.

skeleton.py   a model with fake weights: a copy of a loaded one, or made from a configuration file
live.py       counts the bytes of live tensors by part while a step runs
shapes.py     the largest micro-batch that the memory loop will make
step.py       runs forward and backward passes until the peak of a step is known
predict.py    combines these into the figures that ``hardware/estimate.py`` adds up
"""
