"""The command `warmprefix plan-batch`, which docs/batch.md describes."""
