"""``meshrun``: starts the ranks of a job, watches them, and ends all of them when one fails.

- ``__main__`` is the command, ``options.arguments`` reads its line, ``launch`` runs the job.
- ``agent`` is the event loop of one node, ``nodes`` its talk with the other nodes.
- ``ranks`` has the ranks of a node. Their processes are started by ``starting`` and ended by
  ``workers``; ``bootstrap`` runs in each before the user's program; ``failure`` decides which rank
  failed first.
- ``spawn`` starts ranks from a running program, by the same means.
"""
