"""What a rank learns of its job: the watcher of the events, stalls, samples of the calls."""
