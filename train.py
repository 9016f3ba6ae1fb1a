"""Train, resume or plan a run.

torchrun --nproc_per_node=N train.py --job.config_file F.toml [--section.key value ...]
python train.py --job.config_file F.toml --plan [--gpus N] [--mfu 0.4] [--peak-tflops 989]
"""

import sys

from regdrop_titan.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
