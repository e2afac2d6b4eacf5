"""Predicts memory between steps and at their peak: ``memory_report`` for a model, ``plan_memory`` for a config."""

from fsdp2x.plan.plan import plan_memory
from fsdp2x.plan.report import MemoryReport, memory_report
from fsdp2x.plan.request import PlanRequest

__all__ = ["MemoryReport", "PlanRequest", "memory_report", "plan_memory"]
