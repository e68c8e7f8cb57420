"""A rank's view of its job: the event watcher, stalls, samples of the calls."""
