"""Runs Triton kernels on the CPU, in Triton's interpreter: with bfloat16 as a GPU computes it, and
with the programs of several ranks at once under a weak memory model.

    with interpreted():
        launch(kernel, tensors)                    one kernel, alone

    executor = Executor(seed=3, ranks=4)           several ranks that wait for each other
    executor.launch(rank, kernel, tensors)
    executor.run()

`queues.py` runs the fused collectives of programs in it (`msc.runtime.fused_kernels`).

Triton interprets only where TRITON_INTERPRET=1 was set before it was first imported.
"""

from msc.testing.interpreter.executor import Deadlock, Executor
from msc.testing.interpreter.one_kernel import interpreted

__all__ = ["Deadlock", "Executor", "interpreted"]
