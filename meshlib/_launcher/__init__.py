"""``meshrun``: starts the ranks of a job, watches them, and ends all of them when one fails.

- ``__main__`` is the command, ``options.arguments`` parses its arguments, ``launch`` runs the job.
- ``agent`` is the event loop of one node, ``nodes`` its communication with other nodes.
- ``ranks`` has the ranks of a node: ``starting`` starts their processes and ``workers`` ends them;
  ``bootstrap`` runs in each before the user's program; ``failure`` finds the rank that failed
  first.
- ``spawn`` starts ranks from a running program in the same way.
"""
