"""Coordinate check: activations of models of several widths, depths and layer densities after a few steps.

    python scripts/coord_check.py --config train_configs/debug_celerity.toml \\
        --widths 64 128 256 --depths 2 4 8 16 32 --densities 1.0 0.8 0.6 0.4 0.2
    ... --parametrization.kind standard          # any key of the TOML can be overridden

Each axis varies alone, the other two are the configuration's (density 1). Writes coord_check.json and coord_check.png
into --output. Runs on one GPU where there is one. See docs/completep.md.
"""

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from regdrop_titan.config import ConfigError, load_config
from regdrop_titan.data.packed import DataError
from regdrop_titan.data.stdlib_corpus import build_stdlib_corpus
from regdrop_titan.files import write_json
from regdrop_titan.parametrization.coordinates import groups, measure, plan_curves, plot_curves, spread
from regdrop_titan.parametrization.short_runs import Batches
from regdrop_titan.signals import interruptible


def check_arguments(arguments: argparse.Namespace) -> list[str]:
    faults = [f"--steps {arguments.steps}: must be at least 1"] if arguments.steps < 1 else []
    for name in ("widths", "depths"):
        faults += [f"--{name} {value}: must be at least 1" for value in getattr(arguments, name) if value < 1]
    return faults + [f"--densities {value}: must be in (0, 1]" for value in arguments.densities if not 0 < value <= 1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="TOML of the model, its parametrization and data")
    parser.add_argument("--widths", type=int, nargs="*", default=[], metavar="D")
    parser.add_argument("--depths", type=int, nargs="*", default=[], metavar="L")
    parser.add_argument("--densities", type=float, nargs="*", default=[], metavar="RHO", help="uniform, 1 - p")
    parser.add_argument("--scales", nargs="+", choices=("inverse_density", "none"), default=["inverse_density", "none"],
                        help="of layer dropout, for the densities")  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, help="training steps before the activations are read")
    parser.add_argument("--output", default="outputs/coord_check", help="folder for JSON and PNG")
    arguments, overrides = parser.parse_known_args()
    try:
        config = load_config(["--job.config_file", arguments.config, *overrides])
        if faults := check_arguments(arguments):
            raise ConfigError(faults)
        curves = plan_curves(config, arguments.widths, arguments.depths, arguments.densities, arguments.scales)
        if not curves:
            raise ConfigError(["nothing to compare: give --widths, --depths or --densities"])
        if config.training.dataset_source == "stdlib":
            build_stdlib_corpus(Path(config.training.dataset_path or "").parent)
        data = Batches(config, arguments.steps)
    except (ConfigError, DataError) as error:
        print(f"error: the check cannot run:\n{error}", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tqdm(total=len(curves) * arguments.steps, unit="step", mininterval=1.0) as bar:
        for curve, sized in curves:
            bar.set_description(f"{curve.axis} {curve.value:g}, {curve.scale}")
            measure(curve, sized, data, device, bar.update)
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    apart = {f"{axis} {scale}": spread(members) for (axis, scale), members in groups([c for c, _ in curves]).items()}
    write_json(folder / "coord_check.json", {
        "config": arguments.config, "overrides": overrides, "steps": arguments.steps, "apart": apart,
        "curves": [vars(curve) for curve, _ in curves],
    })  # fmt: skip
    plot_curves([curve for curve, _ in curves], folder / "coord_check.png")
    print("| varied | layer dropout's scale | value | mean |x| after the last layer | loss |\n|---|---|---|---|---|")
    for curve, _ in curves:
        print(f"| {curve.axis} | {curve.scale} | {curve.value:g} | {curve.last[-1]:.4f} | {curve.losses[-1]:.4f} |")
    for name, share in apart.items():
        print(f"{name}: curves lie {100 * share:.1f} % apart")
    print(f"wrote {folder}/coord_check.json and coord_check.png")
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))
