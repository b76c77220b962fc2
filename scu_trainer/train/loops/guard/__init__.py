"""What the guard of steps works with: where bad numbers began, spikes and their rows, divergence."""
