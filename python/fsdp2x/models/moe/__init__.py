"""Mixtures of experts: experts as units of their own, grouped GEMM, and expert parallelism. See README.md."""
