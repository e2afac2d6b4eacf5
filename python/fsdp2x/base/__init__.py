"""Foundation of the package: the compiled engine, torch's private names, argument checks, and agreement of ranks."""
