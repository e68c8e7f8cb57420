"""Messages between the ranks and launchers of a job, through logs in the store."""
