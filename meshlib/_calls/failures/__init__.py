"""From one rank's trouble to one message that all members raise."""
