"""``fully_shard`` and what happens to a unit afterwards: hooks, lazy initialization, settings, moves, and its end."""
