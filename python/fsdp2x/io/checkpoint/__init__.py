"""Checkpoints in three forms: atomic, resumable on other world sizes, in the background. Loading executes no code."""
