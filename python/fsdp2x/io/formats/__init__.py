"""Reads files and checks their contents before use. README.md says which module reads what."""
