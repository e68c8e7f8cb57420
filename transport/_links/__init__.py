"""The base classes of communicators that use links and mailboxes."""
