"""The way to and from HuggingFace files; import the module you need: ``names``, ``export``."""
