"""Answers of a model that is trained: messages -> tokens -> text, one at a time as it is written, or many at once."""
