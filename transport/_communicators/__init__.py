"""The interface of communicators, the state that a rank's communicators share, and a registry."""
