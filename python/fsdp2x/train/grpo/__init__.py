"""Reinforcement learning of a policy from rewards, by one command: GRPO and its relatives, and PPO with a critic."""
