"""The World of a rank: its beginning, its contents and its end."""
