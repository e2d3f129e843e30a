"""Planning many requests at once, before the first of them runs."""
