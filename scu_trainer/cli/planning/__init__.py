"""See docs/architecture.md."""

OPTIMAL = "optimal_config.yaml"
"""The file that ``hardware config`` writes, and that ``runs start`` reads if no other file is given."""
