"""Reports on values: tables, plots and pages. Reads values only."""
