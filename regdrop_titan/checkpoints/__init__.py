from .loading import CheckpointError, complete_steps, load_model, resolve_checkpoint, run_config

__all__ = ["CheckpointError", "complete_steps", "load_model", "resolve_checkpoint", "run_config"]
