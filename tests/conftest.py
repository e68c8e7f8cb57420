"""Settings of all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# Ranks that are threads share XLA's threads, and a rank that waits holds one of them: there have
# to be more than ranks. XLA reads this when JAX is first used; ranks that are processes need none.
os.environ.setdefault("NPROC", "16")

# No test asserts a time, and none depends on luck: the same examples come on each run.
settings.register_profile("meshlib", deadline=None, derandomize=True)
settings.load_profile("meshlib")

# A shell that starts the tests in the background has SIGINT ignored, which the programs that the
# tests start and interrupt would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
