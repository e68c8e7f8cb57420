"""``meshrun``: starts the ranks of a job, watches them, and ends all of them when one fails.

``cli`` is the command, ``arguments`` reads its line, ``launch`` runs what it asks for. ``agent`` is
the event loop of one node, ``workers`` are its ranks' processes, ``coordinator`` is what an agent
knows about other nodes, ``failure`` decides which rank failed first, and ``bootstrap`` is what runs
inside each rank before the user's program.
"""
