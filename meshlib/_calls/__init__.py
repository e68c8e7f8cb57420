"""One call: its queue, its fast path, and the Work that waits for it."""
