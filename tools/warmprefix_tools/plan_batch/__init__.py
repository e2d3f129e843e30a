"""The command `warmprefix plan-batch`: a recorded trace, planned as one batch. docs/batch.md describes it."""
