"""What a sharded model is made of, a trace of it, its memory given away for a while."""
