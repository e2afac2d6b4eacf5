"""Trains a policy from rewards with one command: GRPO and its relatives, and PPO with a critic."""
