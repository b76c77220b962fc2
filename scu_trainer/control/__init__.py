"""The mathematics of the controllers: pure functions from state and measurement to decision, without torch, clocks or
files."""
