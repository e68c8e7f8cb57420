"""How one rank's failure becomes the same error on all members."""
