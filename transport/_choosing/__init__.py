"""Which algorithm, by what it costs; and with whom it exchanges frames."""
