"""From graphs to runnable code: emitted Python, Triton kernels, ahead-of-time compilation."""

if __name__ != "msc.codegen":
    raise ImportError("import this package as msc.codegen, not codegen")
