"""Rollouts: an engine that samples with log-probabilities and takes weights meanwhile, and what trainers ask it."""
