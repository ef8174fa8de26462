"""Normalization of a captured graph: constants, masks, in-place ops, ties, opaque ops."""
