"""Running a planned batch against an OpenAI-compatible endpoint; `BatchPlan.run` is the way in."""

from warmprefix.openai.batch_runner.results import BatchResult
from warmprefix.retries import Retries

__all__ = ["BatchResult", "Retries"]
