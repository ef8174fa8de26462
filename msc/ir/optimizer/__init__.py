"""Optimizers as data: how parameters change at the end of a step, and with which state.

An optimizer is a frozen dataclass of its hyperparameters. It declares the names of its state and
the action of the rank graph that carries out a step (`Optimizer`); everything else is common.
"""

from msc.ir.optimizer.adam import Adam as Adam
from msc.ir.optimizer.adam import AdamW as AdamW
from msc.ir.optimizer.base import Optimizer as Optimizer
from msc.ir.optimizer.group import ParameterGroup as ParameterGroup
from msc.ir.optimizer.lamb import LAMB as LAMB
from msc.ir.optimizer.learning_rate import LearningRate as LearningRate
from msc.ir.optimizer.sgd import SGD as SGD
