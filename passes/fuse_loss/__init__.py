"""A linear head and its cross entropy as one op."""
