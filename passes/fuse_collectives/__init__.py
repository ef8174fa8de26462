"""A collective and the GEMMs beside it as one op."""
