"""Generate answers of a trained model, one at a time as a stream, or many at once in batches."""
