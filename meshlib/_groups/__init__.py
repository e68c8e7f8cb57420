"""Process groups: members, backends, communicators."""
