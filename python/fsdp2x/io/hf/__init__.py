"""The way to and from HuggingFace files; README.md says which module does what."""
