"""Parts of the step guard: where non-finite numbers began, spikes and their rows, divergence."""
