"""``fully_shard`` and the life of a unit after it: hooks, lazy initialization, settings, moves, and its end."""
