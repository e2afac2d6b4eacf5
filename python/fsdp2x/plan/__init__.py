"""Predicts memory between steps and at their peak: ``memory_report`` for a model, ``plan_memory`` for a config."""
