"""The simulate executor: no tensors, the events of one step on a modelled cluster."""

from msc.runtime.simulate.program import simulate_program
from msc.runtime.simulate.result import SimulationResult
from msc.runtime.simulate.simulator import RankClass, simulate

__all__ = ["RankClass", "SimulationResult", "simulate", "simulate_program"]
