"""Plans requests: blocks in, plan out; commit what the model saw.

A request passes through `planner` (the public methods), `request` (blocks to plan), `references` and `conversation`
(prompts with a history, and the seen-block store) and `feedback` (commits and reports), all on one `state`.
"""

from warmprefix.planner.config import PlannerConfig, PlannerOptions
from warmprefix.planner.planner import ContextPlanner
from warmprefix.planner.request import PlanOptions

__all__ = ["ContextPlanner", "PlanOptions", "PlannerConfig", "PlannerOptions"]
