"""Settings that every test shares."""

from __future__ import annotations

import signal

from hypothesis import settings

# No test asserts a duration, so neither does Hypothesis.
settings.register_profile("warmprefix", deadline=None)
settings.load_profile("warmprefix")

# Who starts the tests in the background, or with nohup, has signals ignored that commands under test must heed.
for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
