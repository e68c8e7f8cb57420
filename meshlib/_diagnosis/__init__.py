"""A rank's view of its job: the event watcher, stall detection, and samples of calls."""
