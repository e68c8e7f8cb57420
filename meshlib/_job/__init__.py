"""The World of a rank: how it begins and ends, and what it holds."""
