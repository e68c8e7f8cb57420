"""What the ranks and launchers of a job tell each other, through logs in the store."""
