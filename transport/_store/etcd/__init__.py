"""A store in an existing etcd, version 3.4 or later, by its API over HTTP."""
