"""Reports on values: tables, plots, graphs, exports and launch scripts. Reads values only."""
