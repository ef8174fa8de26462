"""Triton kernels, emitted as Python source from a description of shapes, dtypes, fusion and target.

The same text is run by Triton's interpreter in tests, compiled ahead of time for the report of
`make kernels`, and launched on a device. No module here imports Triton before a kernel is loaded,
because Triton decides once per process whether it compiles or interprets.
"""
