"""The cold path of the engine: mesh, parameters and DTensors, pools, state, hooks."""
