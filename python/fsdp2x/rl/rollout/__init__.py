"""Samples rollouts: an engine that returns log-probabilities and takes new weights, and its client for trainers."""
