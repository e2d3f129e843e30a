"""`warmprefix doctor`: reads a log of requests, and finds the causes of misses in the prefix cache."""
