"""The commands of `fsdp2x`, one module each with `add(commands)`: parse, call, and report mistakes in a sentence."""
