"""Checkpoints of a run: when they are made, resumed from, and what `msc ckpt` does with them.

`runtime/checkpoint/` copies, writes and reads them.
"""
