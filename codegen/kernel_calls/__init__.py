"""Calls of a program's graphs that run in Triton kernels: which, why, and how they are launched.

`choice.py` decides for each call, from its shapes and dtypes and the target; the other files say
per op which kernels compute it, from operands as they come to results as ATen's op has them.
"""
