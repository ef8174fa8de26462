"""The files beside the tensors of a checkpoint that MSC reads again, or that say what was run."""

HISTORY = "history.json"
PLAN = "plan.json"
