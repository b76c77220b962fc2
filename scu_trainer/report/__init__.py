"""Run directories and comparisons -> figures, tables, images, pages. Reads files only."""
