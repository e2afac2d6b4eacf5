"""Long sequences and samples of different lengths: packing, attention over samples, Ulysses, and the loss of both."""
