"""What a training step will hold in memory, found from shapes alone: the step runs once on tensors without content.

skeleton.py   the model, its weights without content: of a job that is loaded, or of a configuration file
live.py       counts what is alive while a step runs, by part
shapes.py     the largest micro-batch that the memory loop will make of a step
step.py       runs the step: as many forward and backward passes as it takes to see its highest moment
predict.py    all of it together: the figures that ``hardware/estimate.py`` adds up
"""
