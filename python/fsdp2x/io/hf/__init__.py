"""Reads and writes HuggingFace files. README.md lists the modules."""
