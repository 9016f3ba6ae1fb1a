"""Evaluate checkpoints of runs.

    python scripts/evaluate.py position-loss --checkpoint outputs/RUN/checkpoint --data data/stdlib/long
    python scripts/evaluate.py depth --checkpoint outputs/RUN/checkpoint --data data/stdlib/validation
    python scripts/evaluate.py copying --checkpoint outputs/RUN/checkpoint

Results are JSON and PNG files in --output (default: `evaluation` in the run's folder).
"""

import argparse
import sys
from pathlib import Path

from regdrop_titan.checkpoints import CheckpointError
from regdrop_titan.data.packed import DataError
from regdrop_titan.evaluation.subjects import InputError, Subject, checkpoint_subject, unique_labels
from regdrop_titan.evaluation.verbs import copying, depth, lm_eval, position_loss
from regdrop_titan.signals import interruptible

VERBS = (position_loss, lm_eval, depth, copying)


def find_subjects(arguments: argparse.Namespace) -> list[Subject]:
    """The models that the arguments name. Raises InputError with a line for each that is none."""
    subjects, faults = [], []
    for path in arguments.checkpoint:
        try:
            subjects.append(checkpoint_subject(path, tokenizer=arguments.tokenizer))
        except CheckpointError as error:
            faults.append(str(error))
    if arguments.labels is not None and len(arguments.labels) != len(arguments.checkpoint):
        faults.append(f"--labels: {len(arguments.labels)} for {len(arguments.checkpoint)} models")
    if faults:
        raise InputError("\n".join(faults))
    for subject, label in zip(subjects, arguments.labels or (), strict=False):
        subject.label = label
    unique_labels(subjects)
    return subjects


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
            "--checkpoint", nargs="+", required=True, metavar="DIR",
            help="…/checkpoint/step-N, or …/checkpoint for the newest; several stand in one plot",
        )  # fmt: skip
        command.add_argument("--labels", nargs="+", help="names of the models in tables and plots")
        command.add_argument("--tokenizer", help="folder, file or 'bytes'; default: the one kept beside the data")
        command.add_argument("--output", type=Path, help="folder for the results; default: evaluation in the run's")
        verb.add_arguments(command)
    arguments = parser.parse_args()
    try:
        arguments.evaluate(find_subjects(arguments), arguments)
    except (InputError, CheckpointError, DataError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))
