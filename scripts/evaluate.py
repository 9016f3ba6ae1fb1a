"""Evaluate checkpoints of runs.

    python scripts/evaluate.py position-loss --checkpoint outputs/RUN/checkpoint --data data/stdlib/long
    python scripts/evaluate.py depth --checkpoint outputs/RUN/checkpoint --data data/stdlib/validation
    python scripts/evaluate.py copying --checkpoint outputs/RUN/checkpoint
    python scripts/evaluate.py moments --checkpoint outputs/RUN/checkpoint --data data/stdlib/validation
    python scripts/evaluate.py position-loss --hf SmolLM3-3B --rope-scaling yarn:4 --data data/books --output results

Results are JSON and PNG files in --output (default: `evaluation` in the run's folder).
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from regdrop_titan.checkpoints import CheckpointError
from regdrop_titan.data.packed import DataError
from regdrop_titan.evaluation.subjects import (
    InputError,
    Subject,
    checkpoint_subject,
    huggingface_subject,
    scale_positions,
    tell,
    unique_labels,
)
from regdrop_titan.evaluation.verbs import copying, depth, lm_eval, moments, position_loss
from regdrop_titan.signals import interruptible

VERBS = (position_loss, lm_eval, depth, moments, copying)


def find_subjects(arguments: argparse.Namespace) -> list[Subject]:
    """The models that the arguments name. Raises InputError with a line for each that is none."""
    subjects: list[Subject] = []
    faults = faults_of_sources(arguments)
    sources = [partial(checkpoint_subject, path) for path in arguments.checkpoint]
    sources += [partial(huggingface_subject, path, context=arguments.context) for path in arguments.hf]
    for source in sources:
        try:
            subject = source(tokenizer=arguments.tokenizer)
            if arguments.rope_scaling is not None:
                scale_positions(subject, arguments.rope_scaling)
            subjects.append(subject)
        except (CheckpointError, InputError) as error:
            faults.append(str(error))
    if arguments.labels is not None and len(arguments.labels) != len(sources):
        faults.append(f"--labels: {len(arguments.labels)} for {len(sources)} models")
    if faults:
        raise InputError("\n".join(faults))
    for subject, label in zip(subjects, arguments.labels or (), strict=False):
        subject.label = label
    unique_labels(subjects)
    return subjects


def faults_of_sources(arguments: argparse.Namespace) -> list[str]:
    """What is wrong with how the models are named, a line each."""
    faults = []
    if not arguments.checkpoint and not arguments.hf:
        faults.append("name a model by --checkpoint or --hf")
    if arguments.hf and arguments.output is None:
        faults.append("--hf: say by --output where the results go")
    if arguments.context is not None and not arguments.hf:
        faults.append("--context: is of --hf; a run's config.json has its own")
    if arguments.context is not None and arguments.context < 1:
        faults.append(f"--context {arguments.context}: must be at least 1")
    return faults


def yarn_factor(text: str) -> float:
    """The factor of `yarn:FACTOR`."""
    kind, _, factor = text.partition(":")
    try:
        if kind == "yarn" and float(factor) >= 1:
            return float(factor)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: must be yarn:FACTOR, with a factor of at least 1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for verb in VERBS:
        command = commands.add_parser(
            verb.NAME, help=verb.SUMMARY, description=verb.__doc__.splitlines()[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )  # fmt: skip
        command.set_defaults(evaluate=verb.evaluate)
        command.add_argument(
            "--checkpoint", nargs="+", default=[], metavar="DIR",
            help="…/checkpoint/step-N, or …/checkpoint for the newest; several stand in one plot",
        )  # fmt: skip
        command.add_argument(
            "--hf", nargs="+", default=[], metavar="DIR", help="Hugging Face folders; may stand beside --checkpoint"
        )
        command.add_argument(
            "--context", type=int, help="of --hf: tokens that the model was trained on; default: its config.json's"
        )
        command.add_argument(
            "--rope-scaling", type=yarn_factor, metavar="yarn:FACTOR",
            help="YaRN for FACTOR times the training context, of models with rotary positions",
        )  # fmt: skip
        command.add_argument("--labels", nargs="+", help="names of the models in tables and plots")
        command.add_argument("--tokenizer", help="folder, file or 'bytes'; default: the one kept beside the data")
        command.add_argument("--output", type=Path, help="folder for the results; default: evaluation in the run's")
        verb.add_arguments(command)
    arguments = parser.parse_args()
    try:
        arguments.evaluate(find_subjects(arguments), arguments)
    except (InputError, CheckpointError, DataError) as error:
        return tell(error)
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))
