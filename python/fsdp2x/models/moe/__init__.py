"""Shards mixtures of experts: one unit per expert group, grouped GEMM, and expert parallelism. See README.md."""
