"""Capture: the user's module and loss as one graph of tensor ops on global shapes (`entry`)."""
