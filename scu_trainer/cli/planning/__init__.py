"""See docs/architecture.md."""

OPTIMAL = "optimal_config.yaml"
"""What ``hardware config`` writes, and ``runs start`` reads where no other file is named."""
