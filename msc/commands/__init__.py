"""The commands of `msc`, by group; `msc/cli.py` puts them together."""
