"""Measuring the calls of a program on the device where it will run: `msc.tune`, `msc tune`."""
