"""Run directories and comparisons -> figures, tables, pictures, pages. Reads files only."""
