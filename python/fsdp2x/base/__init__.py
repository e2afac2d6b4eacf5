"""The ground: the compiled engine, torch's private names, argument checks, and how ranks agree on what they do."""
