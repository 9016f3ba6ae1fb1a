from .loading import load_model, resolve_checkpoint, run_config
from .safety import CheckpointError, check_complete, survey

__all__ = ["CheckpointError", "check_complete", "load_model", "resolve_checkpoint", "run_config", "survey"]
