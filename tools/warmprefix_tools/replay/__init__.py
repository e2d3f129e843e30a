"""Replay of recorded retrieval traces through ordering policies and caches of any size."""
