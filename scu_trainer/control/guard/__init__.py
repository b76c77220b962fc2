"""Detectors that watch a run: spikes of single steps, and divergence of the loss."""
