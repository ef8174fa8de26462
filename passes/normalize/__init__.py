"""Normalization: from what torch.export gives to functional graphs of ATen and opaque MSC ops."""
