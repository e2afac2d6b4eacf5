"""Bytes at rest and at the peak of a step, from the plan: ``memory_report`` of a model, ``plan_memory`` of a config."""

from fsdp2x.plan.plan import plan_memory
from fsdp2x.plan.report import MemoryReport, memory_report

__all__ = ["MemoryReport", "memory_report", "plan_memory"]
