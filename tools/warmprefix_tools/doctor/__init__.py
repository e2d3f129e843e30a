"""`warmprefix doctor`: what keeps the prefix cache cold, read from a log of requests."""
