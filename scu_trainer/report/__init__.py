"""Turn run directories and comparisons into figures, tables, images and pages. Reads files only."""
