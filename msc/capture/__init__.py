"""Capture: the user's module and loss as one graph of tensor ops on global shapes."""

from __future__ import annotations

from msc.capture.captured import BufferInfo, Captured, InputInfo, ParameterInfo
from msc.capture.entry import capture

__all__ = ["BufferInfo", "Captured", "InputInfo", "ParameterInfo", "capture"]
