"""Who blocks whom: what every rank has communicated so far, joined with what its program says."""
