"""A store in an existing etcd, version 3.4 or later, over its HTTP API."""
