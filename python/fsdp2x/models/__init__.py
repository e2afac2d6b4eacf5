"""Changes of models: adapters, frozen parts, towers that some ranks skip, MLPs in chunks."""
