"""Changes models: adapters, frozen parts, vision towers that some ranks skip, MLPs in chunks."""
