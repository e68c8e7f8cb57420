"""``meshrun``: starts the ranks of a job, watches them, and ends all of them when one fails.

``__main__`` is the command, ``options.arguments`` reads its line, ``launch`` runs what it asks for.
``agent`` is the event loop of one node; ``nodes`` has its part in the job and what others say;
``ranks`` has its ranks: ``starting`` tells them their places and starts them, ``workers`` are
their processes, which it ends, ``failure`` decides which of them failed first, and ``bootstrap``
is what runs inside each before the user's program. ``spawn`` starts ranks from a running program,
by the same means.
"""
