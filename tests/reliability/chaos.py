"""A training run under fire: after every fault the same command again, and in the end the undisturbed run's weights.

    ./scripts/chaos.sh --faults 50

Two ranks train a small model with VPAD and layer dropout, saving asynchronously every few steps. Between, and during,
starts, steps and saves come, in a random order with a fixed seed: kill -9 of one rank or of all, SIGTERM to one or to
all, a full disk, a file of the newest checkpoint cut or deleted. The newest whole checkpoint is watched all the time.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

from regdrop_titan.checkpoints import load_model, survey
from regdrop_titan.metrics import read_records

from ..distributed.harness import BASE
from ..distributed.ranks import Ranks, train
from ..packed_sets import markov_documents, write_packed

STEPS_A_FAULT = 8  # at most, before it comes
INTERVAL = 3  # steps between checkpoints
FAULTS = ("kill one", "kill all", "terminate one", "terminate all", "full disk", "cut file", "lost file")


def arguments(folder: Path, steps: int) -> list[str]:
    return [
        "--job.config_file", str(folder / "run.toml"), "--training.steps", str(steps), "--lr_scheduler.total_steps",
        str(steps), "--optimizer.lr", "1e-3", "--checkpoint.enable", "--checkpoint.interval", str(INTERVAL),
        "--checkpoint.keep_latest_k", "3", "--checkpoint.async_mode", "async", "--dropout.placement", "vpad",
        "--dropout.p", "0.1", "--layer_dropout.p_max", "0.5", "--validation.enable", "--validation.freq", "5",
    ]  # fmt: skip


class Watch:
    """Looks at a folder of checkpoints all the time: the newest whole one must not go before a newer one is whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest = 0
        self.faults: list[str] = []
        self.damage = threading.Lock()  # held by whoever damages a checkpoint on purpose
        self.running = True
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()

    def look(self) -> None:
        while self.running:
            with self.damage:
                # a folder may go while it is looked at: only what is missing twice is missing
                if self.newest and not self.whole_from(self.newest) and not self.whole_from(self.newest):
                    self.faults.append(f"step-{self.newest} vanished before a newer checkpoint was whole")
                    self.newest = 0
                self.newest = max(self.complete(), default=self.newest)
            time.sleep(0.05)

    def complete(self) -> list[int]:
        return survey(self.folder)[0]

    def whole_from(self, step: int) -> bool:
        return any(other >= step for other in self.complete())

    def stop(self) -> None:
        self.running = False
        self.thread.join()


class Chaos:
    """One run of `n_faults` faults in `folder`, which is new."""

    def __init__(self, folder: Path, n_faults: int, seed: int) -> None:
        self.folder, self.n_faults = folder, n_faults
        self.random = random.Random(seed)
        self.steps = (STEPS_A_FAULT + 2) * n_faults  # more than can be done before the last fault
        self.run, self.undisturbed = folder / "run", folder / "undisturbed"
        folder.mkdir(parents=True)
        write_packed(folder / "train", markov_documents(120, 100, 256, seed=1), 256)
        write_packed(folder / "validation", markov_documents(7, 100, 256, seed=2), 256)
        (folder / "run.toml").write_text(BASE.format(packed=folder))
        # every kind as often, in a random order
        self.faults = [FAULTS[i % len(FAULTS)] for i in range(n_faults)]
        self.random.shuffle(self.faults)
        self.statuses: Counter[str] = Counter()

    def start(self, dump_folder: Path, file_limit: int | None = None) -> Ranks:
        args = [*arguments(self.folder, self.steps), "--job.dump_folder", str(dump_folder)]
        return Ranks(2, functools.partial(train, args=args), self.folder / f"{dump_folder.name}.log", file_limit)

    def logged(self) -> int:
        records = read_records(self.run / "metrics.jsonl")
        return records[-1]["step"] if records else 0

    def wait_a_while(self, ranks: Ranks) -> None:
        """For a few steps and a part of one; one time in five only for a moment of the start."""
        if self.random.random() < 0.2:
            time.sleep(self.random.uniform(0, 3))
            return
        before, steps = self.logged(), self.random.randint(1, STEPS_A_FAULT)
        end = time.monotonic() + 120
        while ranks.alive and self.logged() - before < steps:
            assert time.monotonic() < end, f"no step for 2 minutes:\n{ranks.said()[-3000:]}"
            time.sleep(0.01)
        time.sleep(self.random.uniform(0, 0.1))

    def suffer(self, fault: str, watch: Watch) -> None:
        if fault in ("cut file", "lost file"):
            with watch.damage:
                self.damage(fault)
                watch.newest = max(watch.complete(), default=0)
            return
        # a disk with room for the logs and a part of a checkpoint's file
        ranks = self.start(self.run, self.random.randint(50_000, 400_000) if fault == "full disk" else None)
        if fault == "full disk":
            statuses = ranks.wait()
            assert any(statuses), f"a full disk was not noticed: {statuses}"
        else:
            self.wait_a_while(ranks)
            kind, whom = fault.split()
            number = signal.SIGKILL if kind == "kill" else signal.SIGTERM
            ranks.signal(number, self.random.randrange(2) if whom == "one" else None)
            statuses = ranks.wait()
        self.statuses[f"{fault}: {sorted(statuses)}"] += 1

    def damage(self, fault: str) -> None:
        """Of the newest whole checkpoint, if another one is left."""
        complete = survey(self.run / "checkpoint")[0]
        if len(complete) < 2:
            self.statuses[f"{fault}: not with {len(complete)} whole checkpoints"] += 1
            return
        newest = self.run / f"checkpoint/step-{complete[-1]}"
        file = self.random.choice(sorted(newest.iterdir()))
        if fault == "cut file":
            os.truncate(file, self.random.randrange(file.stat().st_size))
        else:
            file.unlink()
        self.statuses[f"{fault}: {file.suffix or file.name}"] += 1

    def carry_out(self) -> None:
        watch = Watch(self.run / "checkpoint")
        bar = tqdm(self.faults, desc="faults", disable=not sys.stderr.isatty())
        for fault in bar:
            bar.set_postfix_str(f"{fault}, step {self.logged()} of {self.steps}")
            self.suffer(fault, watch)
        ranks = self.start(self.run)
        assert ranks.wait(600) == [0, 0], ranks.said()[-5000:]
        watch.stop()
        undisturbed = self.start(self.undisturbed)
        assert undisturbed.wait(600) == [0, 0], undisturbed.said()[-5000:]
        assert not watch.faults, watch.faults

    def check(self) -> dict:
        """Compare with the undisturbed run, bit for bit; raises AssertionError."""
        a, b = (load_model(folder / "checkpoint").state_dict() for folder in (self.run, self.undisturbed))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), "the weights differ"
        runs = []
        for log, every in (("metrics.jsonl", range(1, self.steps + 1)), ("validation.jsonl", None)):
            once, whole = (read_records(folder / log) for folder in (self.run, self.undisturbed))
            assert [r["step"] for r in once] == [r["step"] for r in whole], f"{log}: not every step once"
            assert every is None or [r["step"] for r in once] == list(every)
            for key in ("loss", "grad_norm", "lr", "tokens", "kept_fraction"):
                assert [r.get(key) for r in once] == [r.get(key) for r in whole], f"{log}: {key} differs"
            runs.append(once)
        return {"faults": self.n_faults, "steps": self.steps, "last_loss": runs[0][-1]["loss"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of their order and times (default 0)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/chaos"), help="is emptied (default outputs/chaos)")
    given = parser.parse_args()
    if given.faults < 1:
        parser.error(f"--faults {given.faults}: must be at least 1")
    if given.folder.exists():
        if not (given.folder / "run.toml").exists() and any(given.folder.iterdir()):
            parser.error(f"--folder {given.folder}: is there, and is not of an earlier chaos run")
        shutil.rmtree(given.folder)
    begun = time.monotonic()
    chaos = Chaos(given.folder, given.faults, given.seed)
    try:
        chaos.carry_out()
        result = chaos.check()
    except AssertionError as error:
        print(f"FAILED: {error}\nlogs: {given.folder}/*.log.*", file=sys.stderr)
        return 1
    finally:
        for what, times in sorted(chaos.statuses.items()):
            print(f"{times:4d} x {what}")
    result |= {"seed": given.seed, "seconds": round(time.monotonic() - begun, 1)}
    print(
        f"{given.faults} faults in {result['seconds']:.0f} s: weights, losses and logs of all {result['steps']} steps "
        f"are those of the undisturbed run, bit for bit (last loss {result['last_loss']})"
    )
    (given.folder / "chaos.json").write_text(json.dumps(result | {"what": dict(chaos.statuses)}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
