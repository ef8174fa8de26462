"""Fused collectives in Triton kernels: memory that ranks share, and queues of copies and launches."""
