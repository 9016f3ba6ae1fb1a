"""RegDrop-Titan: pre-training of regularized language models on TorchTitan."""

from . import platform

__version__ = "0.1.0"

platform.prepare()  # before any other part of TorchTitan is imported


def _register() -> None:
    """Make the model families known to TorchTitan."""
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

    from .data.loader import build_dataloader
    from .distributed import parallelize
    from .evaluation.validation import Validator
    from .metrics import build_metrics_processor
    from .models import FAMILIES, Decoder, Flavors
    from .trainer import build_loss, build_tokenizer

    for name in FAMILIES:
        register_train_spec(
            name,
            TrainSpec(
                model_cls=Decoder,
                model_args=Flavors(name),
                parallelize_fn=parallelize,
                pipelining_fn=pipeline_llm,
                build_optimizers_fn=build_optimizers,
                build_lr_schedulers_fn=build_lr_schedulers,
                build_dataloader_fn=build_dataloader,
                build_tokenizer_fn=build_tokenizer,
                build_loss_fn=build_loss,
                build_validator_fn=Validator,
                build_metrics_processor_fn=build_metrics_processor,
            ),
        )


_register()
