"""Running a planned batch against an OpenAI-compatible endpoint, or as files for a batch service."""

from warmprefix_openai.batch_runner.journal import BatchResult
from warmprefix_openai.batch_runner.runner import BatchRunner

__all__ = ["BatchResult", "BatchRunner"]
