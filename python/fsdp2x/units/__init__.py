"""Which modules form a unit, and how units and sharded parameters of a model are found."""
