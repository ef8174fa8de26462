"""Graph passes: each takes a graph and returns a graph, one transformation per file."""

if __name__ != "msc.passes":
    raise ImportError("import this package as msc.passes, not passes")
