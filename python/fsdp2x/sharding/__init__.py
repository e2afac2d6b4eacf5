"""What is cut, along which dim, over which ranks: units, meshes, specs, and the pool of a group of parameters."""
