"""Settings that every test shares."""

from __future__ import annotations

from hypothesis import settings

# No test asserts a duration, so neither does Hypothesis.
settings.register_profile("warmprefix", deadline=None)
settings.load_profile("warmprefix")
