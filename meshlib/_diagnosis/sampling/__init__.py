"""Samples of a rank's calls: a small summary each second while a monitor watches the job."""
