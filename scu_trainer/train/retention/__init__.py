"""See docs/retain.md."""
