"""Targets of pushes, with one file for each kind of engine."""
