"""Bytes at rest and at the peak of a step, from the plan: ``memory_report`` of a model, ``plan_memory`` of a config."""
