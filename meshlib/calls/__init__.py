"""One call: its turn, its shortcut, and the Work that waits for it."""
