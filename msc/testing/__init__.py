"""Tools for testing compiled programs against the model that they were compiled from."""
