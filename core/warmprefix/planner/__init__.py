"""Plans requests: blocks in, plan out; commit what the model saw.

A request passes through `planner` (the public methods), `request` (blocks to plan), `conversation` (the seen-block
store) and `feedback` (commits and reports), all on the state in `scope` and `open_plans`.
"""

from warmprefix.planner.batching import BatchOptions
from warmprefix.planner.config import PlannerOptions
from warmprefix.planner.planner import ContextPlanner
from warmprefix.planner.request import PlanOptions

__all__ = ["BatchOptions", "ContextPlanner", "PlanOptions", "PlannerOptions"]
