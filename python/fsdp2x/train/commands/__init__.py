"""The commands of `fsdp2x`, one module each with `add(commands)`: parse, call, turn mistakes into a sentence."""
