"""Plans requests: blocks in, plan out; commit what the model saw."""

from warmprefix.planner.planner import BatchOptions, ContextPlanner, PlannerOptions, PlanOptions

__all__ = ["BatchOptions", "ContextPlanner", "PlanOptions", "PlannerOptions"]
