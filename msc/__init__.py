"""MSC compiles an ordinary PyTorch model into per-rank parallel training programs.

    import msc

    program = msc.compile(model, batch, mesh="pp=2,dp=2,tp=2", ...)

The public names are loaded when they are first used, so that `import msc.passes.x` loads that pass
and what it needs, and nothing of the code generator or the runtime.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msc.capture.functions import wrap_function as wrap_function
    from msc.checkpoint.options import Checkpoint as Checkpoint
    from msc.compiler import compile as compile
    from msc.cost import Cluster as Cluster
    from msc.guard import Guard as Guard
    from msc.initialization import init as init
    from msc.initializers import Constant as Constant
    from msc.initializers import Normal as Normal
    from msc.initializers import Ones as Ones
    from msc.initializers import Uniform as Uniform
    from msc.initializers import Zeros as Zeros
    from msc.ir.errors import CaptureError as CaptureError
    from msc.ir.errors import CommunicationError as CommunicationError
    from msc.ir.errors import InputError as InputError
    from msc.ir.errors import MSCError as MSCError
    from msc.ir.errors import PlanError as PlanError
    from msc.ir.errors import TrainingError as TrainingError
    from msc.ir.errors import UserError as UserError
    from msc.ir.errors import VerifyError as VerifyError
    from msc.ir.mesh import Mesh as Mesh
    from msc.ir.optimizer import LAMB as LAMB
    from msc.ir.optimizer import SGD as SGD
    from msc.ir.optimizer import Adam as Adam
    from msc.ir.optimizer import AdamW as AdamW
    from msc.ir.optimizer import LearningRate as LearningRate
    from msc.ir.optimizer import ParameterGroup as ParameterGroup
    from msc.ir.pipeline import GraphPass as GraphPass
    from msc.ir.pipeline import Pass as Pass
    from msc.ir.pipeline import UnitPass as UnitPass
    from msc.ir.placement import Partial as Partial
    from msc.ir.placement import Replicate as Replicate
    from msc.ir.placement import Shard as Shard
    from msc.ir.plan import Plan as Plan
    from msc.ir.recompute import MemoryBudget as MemoryBudget
    from msc.passes.rewrites.parallel_block import ParallelBlock as ParallelBlock
    from msc.passes.rewrites.sliding_window import SlidingWindow as SlidingWindow
    from msc.passes.sharding.rules.custom import sharding_rule as sharding_rule
    from msc.pretrained import load_pretrained as load_pretrained
    from msc.program import load as load
    from msc.trainer import Trainer as Trainer
    from msc.tuning.measure import tune as tune
    from msc.verification import verify as verify

__version__ = "0.1.0"

# Triton decides whether it interprets kernels when it is first imported, which `compile` does.
if os.environ.get("MSC_TRITON", "").strip() == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

# Name -> "module:attribute", or a module alone. No module of this package has the name of a public
# function: importing msc.verify would put a module where the function verify belongs.
PUBLIC = {
    "compile": "msc.compiler:compile",
    "load": "msc.program:load",
    "load_pretrained": "msc.pretrained:load_pretrained",
    "tune": "msc.tuning.measure:tune",
    "verify": "msc.verification:verify",
    "init": "msc.initialization:init",
    "Normal": "msc.initializers:Normal",
    "Uniform": "msc.initializers:Uniform",
    "Zeros": "msc.initializers:Zeros",
    "Ones": "msc.initializers:Ones",
    "Constant": "msc.initializers:Constant",
    "SlidingWindow": "msc.passes.rewrites.sliding_window:SlidingWindow",
    "sharding_rule": "msc.passes.sharding.rules.custom:sharding_rule",
    "wrap_function": "msc.capture.functions:wrap_function",
    "Mesh": "msc.ir.mesh:Mesh",
    "Shard": "msc.ir.placement:Shard",
    "Replicate": "msc.ir.placement:Replicate",
    "Partial": "msc.ir.placement:Partial",
    "Plan": "msc.ir.plan:Plan",
    "Cluster": "msc.cost:Cluster",
    "MemoryBudget": "msc.ir.recompute:MemoryBudget",
    "AdamW": "msc.ir.optimizer:AdamW",
    "Adam": "msc.ir.optimizer:Adam",
    "SGD": "msc.ir.optimizer:SGD",
    "LAMB": "msc.ir.optimizer:LAMB",
    "ParameterGroup": "msc.ir.optimizer:ParameterGroup",
    "LearningRate": "msc.ir.optimizer:LearningRate",
    "ParallelBlock": "msc.passes.rewrites.parallel_block:ParallelBlock",
    "Trainer": "msc.trainer:Trainer",
    "Checkpoint": "msc.checkpoint.options:Checkpoint",
    "Guard": "msc.guard:Guard",
    "Pass": "msc.ir.pipeline:Pass",
    "GraphPass": "msc.ir.pipeline:GraphPass",
    "UnitPass": "msc.ir.pipeline:UnitPass",
    "MSCError": "msc.ir.errors:MSCError",
    "UserError": "msc.ir.errors:UserError",
    "CaptureError": "msc.ir.errors:CaptureError",
    "PlanError": "msc.ir.errors:PlanError",
    "InputError": "msc.ir.errors:InputError",
    "TrainingError": "msc.ir.errors:TrainingError",
    "VerifyError": "msc.ir.errors:VerifyError",
    "CommunicationError": "msc.ir.errors:CommunicationError",
    "testing": "msc.testing",
}


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'msc' has no attribute {name!r}")
    module, _, attribute = PUBLIC[name].partition(":")
    value: Any = importlib.import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
