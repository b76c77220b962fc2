"""Models: loading, adapters, the embedded base."""
