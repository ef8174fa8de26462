"""Executors of a compiled program, checkpoints, fault handling, observation and data."""

if __name__ != "msc.runtime":
    raise ImportError("import this package as msc.runtime, not runtime")
