"""Train, resume or plan a run.

torchrun --nproc_per_node=N train.py --job.config_file F.toml [--section.key value ...]
python train.py --job.config_file F.toml --plan [--gpus N] [--mfu 0.4] [--peak-tflops 989]
"""

import sys

if __name__ == "__main__":
    try:
        from regdrop_titan.launch import main

        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # while it starts; once there is something to save, Ctrl-C is one of signals.py's
        sys.exit(130)
