"""Describes what is sharded, along which dim, and over which ranks: units, meshes, specs, and flat buffers."""
