"""Many runs from one file: list, run, or hand them to SLURM or W&B.

    python scripts/sweep.py SWEEP.toml                    # lists the runs, what they cost, and their commands
    python scripts/sweep.py SWEEP.toml --run local        # runs them here; called again, what is missing
    python scripts/sweep.py SWEEP.toml --run slurm --gpus 8 --time 24:00:00 [--submit]
    python scripts/sweep.py SWEEP.toml --run wandb        # a W&B sweep for `wandb sweep` and `wandb agent`

The file's form and what is left behind: docs/sweeps.md. Exit status: 0 all is well; 1 a run failed or cannot run; 2 the
sweep cannot start; 128 + n stopped by signal n, the same command goes on (with --run-one: 75).
"""

import argparse
import dataclasses
import os
import shlex
import sys
from pathlib import Path

from regdrop_titan.signals import STOPPED
from regdrop_titan.sweeps import Sweep, SweepError, read_sweep
from regdrop_titan.sweeps.launchers import Slurm, node_launcher, submit, write_sbatch, write_wandb
from regdrop_titan.sweeps.local import LocalSweep
from regdrop_titan.sweeps.runs import (
    SHIELDED,
    check,
    commands,
    is_done,
    listing,
    local_launcher,
    make_folder,
    settle_changes,
    told,
    train_command,
    write_summary,
)

ROOT = Path(__file__).resolve().parent.parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--run", choices=["print", "local", "slurm", "wandb"], default="print", help="default: print")
    what.add_argument("--run-one", metavar="NAME", help="one of the runs, here; what SLURM tasks and W&B agents call")
    parser.add_argument("--processes", type=int, help="ranks of a run on each node, in place of the file's")
    parser.add_argument("--jobs", type=int, default=1, help="local: runs at once (default: 1)")
    parser.add_argument(
        "--restart-changed", action="store_true",
        help="local: rename folders that hold a run with other settings, and begin it anew",
    )  # fmt: skip
    slurm = parser.add_argument_group("slurm, a job array")
    slurm.add_argument("--nodes", type=int, default=1, help="of each run (default: 1)")
    slurm.add_argument("--gpus", type=int, help="on each node (default: as many as processes; 0: none)")
    slurm.add_argument("--cpus", type=int, help="on each node (default: the cluster's)")
    slurm.add_argument("--time", metavar="[D-]H:MM[:SS]", help="limit of a start (default: the cluster's)")
    slurm.add_argument("--partition")
    slurm.add_argument("--array-parallelism", type=int, metavar="N", help="runs at once (default: all)")
    slurm.add_argument(
        "--submit", action="store_true", help="submit by submitit (needs --time); default: write the file"
    )
    arguments = parser.parse_args()
    for name in ("processes", "jobs", "nodes", "cpus", "array_parallelism"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if arguments.gpus is not None and arguments.gpus < 0:
        parser.error(f"--gpus {arguments.gpus}: must be at least 0")
    if arguments.submit and arguments.time is None:
        parser.error("--submit: needs --time")
    return arguments


def print_runs(sweep: Sweep) -> int:
    configs, invalid = check(sweep.runs, sweep.processes)
    print(f"{listing(sweep, configs, sweep.processes)}\n\n{commands(sweep, configs)}")
    return report_invalid(invalid)


def report_invalid(invalid: dict[str, list[str]]) -> int:
    """Tell what cannot run; returns the exit status."""
    if invalid:
        print(told(invalid), file=sys.stderr)
    return int(bool(invalid))


def checked(sweep: Sweep, world_size: int, restart_changed: bool = False, inputs: bool = True):
    """`check` of a sweep whose folder can be used and holds no runs with other settings."""
    make_folder(sweep)
    configs, _ = check(sweep.runs, world_size)
    settle_changes(sweep.runs, configs, world_size, restart_changed)
    configs, invalid = check(sweep.runs, world_size, inputs)
    if not configs:
        write_summary(sweep, invalid)
        raise SweepError(["none of the runs can run", *told(invalid).splitlines()])
    return configs, invalid


def run_local(sweep: Sweep, arguments: argparse.Namespace) -> int:
    configs, invalid = checked(sweep, sweep.processes, arguments.restart_changed)
    report_invalid(invalid)  # at once: there is time to mend them
    launcher = local_launcher(sweep.processes)
    local = LocalSweep(sweep, configs, launcher, sweep.processes, arguments.jobs, invalid)
    status = local.work()
    print(f"\n{local.table(list(status))}\n{local.progress()}", flush=True)
    for name, why in local.reasons.items():
        print(f"{name} failed: {why}", file=sys.stderr)
    report_invalid(invalid)
    if local.stop.received:
        print("Stopped; the same command goes on.")
        return 128 + local.stop.received
    return int(bool(invalid) or set(status.values()) != {"done"})


def run_one(sweep: Sweep, name: str, restart_changed: bool) -> int:
    """One run, by a SLURM task (or each of its nodes) or a W&B agent."""
    runs = [run for run in sweep.runs if run.name == name]
    if not runs:
        raise SweepError(
            [f"--run-one {name}: not a run of {sweep.file}; it has {', '.join(r.name for r in sweep.runs)}"]
        )
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    world_size, launcher = nodes * sweep.processes, node_launcher(sweep.processes)
    if os.environ.get("SLURM_NODEID", "0") != "0":  # the first node keeps the records
        os.execvp(SHIELDED[0], [*SHIELDED, *train_command(runs[0], launcher)])
    make_folder(sweep)
    configs, invalid = check(runs, world_size)
    if invalid:
        raise SweepError(told(invalid).splitlines())
    settle_changes(runs, configs, world_size, restart_changed)
    local = LocalSweep(sweep, configs, launcher, world_size)
    status = local.work()[name]
    if name in local.reasons:
        print(f"{name} failed: {local.reasons[name]}", file=sys.stderr)
    if status == "stopped" and configs[name].checkpoint.enable:
        return STOPPED
    return int(status != "done")


def hand_to_slurm(sweep: Sweep, arguments: argparse.Namespace) -> int:
    gpus = sweep.processes if arguments.gpus is None else arguments.gpus
    slurm = Slurm(
        arguments.nodes, gpus, arguments.cpus, arguments.time, arguments.partition, arguments.array_parallelism
    )
    configs, invalid = checked(sweep, arguments.nodes * sweep.processes, inputs=arguments.submit)
    missing = [run for run in sweep.runs if run.name in configs and not is_done(run)]
    if not missing:
        print("all runs that can run are done already")
        return report_invalid(invalid)
    if arguments.submit:
        print(f"submitted {len(missing)} runs: {' '.join(submit(sweep, missing, slurm))}")
    else:
        file = write_sbatch(sweep, missing, slurm)
        print(f"wrote {file}, an array of {len(missing)} runs. Submit it:\n{shlex.join(['sbatch', str(file)])}")
    write_summary(sweep, invalid)
    return report_invalid(invalid)


def hand_to_wandb(sweep: Sweep) -> int:
    configs, invalid = checked(sweep, sweep.processes, inputs=False)
    silent = [name for name, config in configs.items() if not config.metrics.enable_wandb]
    if silent:
        raise SweepError(
            [f'{len(silent)} of {len(configs)} runs do not log to W&B: put "metrics.enable_wandb" = true under [set]']
        )
    missing = [run for run in sweep.runs if run.name in configs and not is_done(run)]
    if not missing:
        print("all runs that can run are done already")
        return report_invalid(invalid)
    file = write_wandb(sweep, missing)
    print(f"wrote {file}, a sweep of {len(missing)} runs:\n{shlex.join(['wandb', 'sweep', str(file)])}")
    write_summary(sweep, invalid)
    return report_invalid(invalid)


def main() -> int:
    arguments = parse()
    file = Path(os.path.relpath(arguments.sweep, ROOT))
    os.chdir(ROOT)  # paths in configurations are from there
    try:
        sweep = read_sweep(file)
        if arguments.processes is not None:
            sweep = dataclasses.replace(sweep, processes=arguments.processes)
        if arguments.run_one is not None:
            return run_one(sweep, arguments.run_one, arguments.restart_changed)
        if arguments.run == "local":
            return run_local(sweep, arguments)
        if arguments.run == "slurm":
            return hand_to_slurm(sweep, arguments)
        if arguments.run == "wandb":
            return hand_to_wandb(sweep)
        return print_runs(sweep)
    except SweepError as error:
        print(f"error: the sweep cannot start:\n{error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before a run was started; later ones are passed on to the runs
        sys.exit(130)
