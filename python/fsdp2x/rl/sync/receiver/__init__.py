"""The side of an engine: files that need torch and the standard library only, so that they can be copied there."""
