"""Checkpoints in three forms: atomic, for other world sizes too, in the background, and executing nothing they hold."""
