"""What a rank computes: stages, what they pass on, and parameters that several have."""
