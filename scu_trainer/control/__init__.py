"""The mathematics of the controllers: state in, decision out. No torch, no clock, no files."""
