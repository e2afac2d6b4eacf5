"""Where weights go: one file for each kind of engine."""
