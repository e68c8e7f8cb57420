"""What a rank shows of its calls: progress to monitors, and its flight record."""
