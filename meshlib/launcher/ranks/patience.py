"""How long the launchers wait for ranks to end by themselves, in seconds."""

SETTLE_SECONDS = 0.8
"""What the others get, when a rank has failed, to notice it and end by themselves."""
SETTLE_AFTER_ECHO_SECONDS = 1.0
"""The same when the first to end did so because of another, which has yet to say why."""
FAILURE_GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL when a rank has failed, or after Ctrl-C."""
SIGNAL_GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL when the launcher itself was told to end: ranks may be saving."""
SLURM_GRACE_SECONDS = 25.0
"""The same under Slurm, which kills everything KillWait (30 s) after its own SIGTERM."""
