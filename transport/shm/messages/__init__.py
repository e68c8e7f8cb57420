"""Point-to-point messages: rings, and single copies."""
