"""Train Balcony exits on a frozen model: it can then stop after fewer layers.

    torchrun --nproc_per_node=N scripts/train_exits.py --checkpoint outputs/RUN/checkpoint --exits 2 4
    python scripts/train_exits.py --checkpoint outputs/RUN/checkpoint --training.steps 300

Model, data and batch are those of the run; checkpoints of the exits go to outputs/RUN/exits. The same command goes on
from the newest one. See docs/balcony.md.
"""

import sys


def main() -> int:
    from regdrop_titan.adapters.command import main

    return main(sys.argv[1:], __doc__.splitlines()[0])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # while it starts; once there is something to save, Ctrl-C is one of signals.py's
        sys.exit(130)
