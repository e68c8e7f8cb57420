"""What a rank tells of its calls while somebody watches the job: a small summary a second."""
