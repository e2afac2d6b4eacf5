"""The engine's side: files that need only torch and the standard library, so that they can be copied there."""
