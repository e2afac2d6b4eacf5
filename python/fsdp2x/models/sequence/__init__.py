"""Trains on long sequences and packed samples: packing, attention within samples, Ulysses, and the matching loss."""
