"""`warmprefix plan-batch`: a recorded trace, planned as one batch. docs/batch.md is its page."""
