"""A product and what follows it as one op."""
