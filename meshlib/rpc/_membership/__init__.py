"""The workers, their arrival and their leaving."""
