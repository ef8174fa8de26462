"""Sharding: factor rules of ops, the placement search, and the rewrite to one rank's shapes."""
