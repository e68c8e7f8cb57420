"""Moving bytes between ranks: stores, rendezvous, links, and communicators on flat buffers."""
