"""The exchange of addresses and segments among processes of one host."""
