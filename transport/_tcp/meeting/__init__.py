"""The exchange of addresses and connections between members."""
