"""The exceptions of MSC.

    MSCError
    ├── UserError (ValueError)   the model, the plan or the options cannot be used as given
    │   ├── CaptureError         the model cannot be captured as one graph
    │   ├── PlanError            mesh, placement, schedule or memory do not fit the model
    │   └── InputError           a batch differs from what the program was compiled for
    ├── TrainingError            a run's values cannot be right: not finite, or copies that differ
    ├── VerifyError              a pass broke an invariant: a bug in the pass
    └── CommunicationError       ranks disagree at run time: mismatch, deadlock, other program

User errors speak of the model and the plan: module path, source line, sizes, what to do.
"""

from __future__ import annotations


class MSCError(Exception):
    """Base class of every exception that MSC raises on purpose."""


class UserError(MSCError, ValueError):
    """The model, the plan or the options cannot be used as given."""


class CaptureError(UserError):
    """The model cannot be captured as one graph."""


class PlanError(UserError):
    """Mesh, placement, schedule or memory do not fit the model."""


class InputError(UserError):
    """A batch differs from what the program was compiled for."""


class TrainingError(MSCError, RuntimeError):
    """A run's values cannot be right: not finite, leaping, or copies that differ."""


class VerifyError(MSCError):
    """A pass broke an invariant of the program: a bug in the pass, not in the model."""


class CommunicationError(MSCError, RuntimeError):
    """Ranks disagree: mismatched or missing communication, or different programs."""


class LostRankError(CommunicationError):
    """Another rank does not answer: it has ended, hangs, or was given up."""
