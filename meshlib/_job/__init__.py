"""The World of a rank: how it begins, what it contains, and how it ends."""
