"""Fused collectives in Triton kernels: memory that ranks share, queues of copies and launches."""
