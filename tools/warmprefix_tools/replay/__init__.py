"""Replay of recorded traces through ordering policies and caches of any size."""
