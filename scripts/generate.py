r"""Text from a checkpoint, as it is written.

    python scripts/generate.py --checkpoint outputs/RUN/checkpoint --prompt "def main("
    python scripts/generate.py --checkpoint outputs/RUN/checkpoint --prompt "def main(" --exit-layer 8
    python scripts/generate.py --checkpoint outputs/RUN/checkpoint --prompt "def main(" --speculative 0 1a 1f 3
    python scripts/generate.py --checkpoint outputs/RUN/checkpoint --prompt "def main(" --speculative draft.json
    python scripts/generate.py --checkpoint outputs/RUN/checkpoint --prompt "def main(" --exits outputs/RUN/exits \
        --exit-confidence 0.9

Greedy unless --temperature is above 0. With --speculative these layers draft for the whole model: the text is the same,
and what it cost is told at the end.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from regdrop_titan.adapters import exit_model, load_exits
from regdrop_titan.adapters.balcony import exits_record
from regdrop_titan.checkpoints import CheckpointError
from regdrop_titan.data.tokenizers import Tokenizer
from regdrop_titan.evaluation.subjects import InputError, checkpoint_subject, tell
from regdrop_titan.generation import Draft, generate, generate_confidently
from regdrop_titan.generation.drafts import parse_exit, parse_part, read_draft
from regdrop_titan.generation.measure import Acceptance, Comparison, compare
from regdrop_titan.signals import interruptible


class Stream:
    """Prints the text of one answer as its tokens come, up to a stop string or the end of text."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str], show: bool) -> None:
        self.tokenizer, self.stops, self.show = tokenizer, stops, show
        self.printed = ""

    def text(self, ids: list[int]) -> str:
        """Of all ids so far, up to where it stops."""
        text = self.tokenizer.decode([i for i in ids if i != self.tokenizer.eos_id])
        return min((text.split(stop)[0] for stop in self.stops), key=len, default=text)

    def finished(self, row: int, ids: list[int]) -> bool:
        if ids[-1] == self.tokenizer.eos_id:
            return True
        text = self.tokenizer.decode(ids)
        return any(stop in text for stop in self.stops)

    def wrote(self, row: int, ids: list[int]) -> None:
        if not self.show:
            return
        text = self.text(ids)
        # the end may be half a character, or the beginning of a stop string: it waits
        safe = len(text) - max(
            (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        new = text[len(self.printed) : safe].rstrip("\ufffd")
        if text.startswith(self.printed):
            print(new, end="", flush=True)
            self.printed += new


def find_draft(arguments: argparse.Namespace) -> Draft | None:
    """The draft that the arguments name: layers, or a file of search_draft.py. Raises ValueError."""
    named = arguments.speculative
    if named is None:
        return None
    if len(named) == 1 and not named[0][:1].isdigit():
        draft = read_draft(Path(named[0]))
    else:
        draft = Draft(tuple(map(parse_part, named)))
    changed: dict[str, Any] = {"length": arguments.draft_length, "exit": arguments.draft_exit}
    return dataclasses.replace(draft, **{name: value for name, value in changed.items() if value is not None})


def is_unicode(text: str) -> bool:
    """Whether an argument was UTF-8: other bytes come as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def faults_of(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[str]:
    """Of the texts and of what belongs to a draft, a line each."""
    faults = []
    for i, text in enumerate(arguments.prompt, 1):
        if not text:
            faults.append(f"--prompt {i}: is empty")
        elif not is_unicode(text):
            faults.append(f"--prompt {i}: is not UTF-8")
    for stop in arguments.stop:
        if not stop:
            faults.append("--stop: a stop string is empty")
        elif not is_unicode(stop) or tokenizer.decode(tokenizer.encode(stop).tolist()) != stop:
            faults.append(f"--stop {stop!r}: {tokenizer.name} cannot write it")
    for option in ("draft_length", "draft_exit", "paired"):
        if getattr(arguments, option) is not None and arguments.speculative is None:
            faults.append(f"--{option.replace('_', '-')}: needs a draft (--speculative)")
    if arguments.paired is not None and arguments.paired < 2:
        faults.append(f"--paired {arguments.paired}: quartiles need at least 2")
    return faults


def told(comparison: Comparison) -> str:
    """Of a draft against plain decoding."""
    acceptance, (low, high) = comparison.acceptance, comparison.speed_up_quartiles
    return (
        f"{comparison.tokens_per_second:.1f} tokens/s with the draft, {comparison.plain_tokens_per_second:.1f} "
        f"without: {comparison.speed_up:.3f} [{low:.3f}, {high:.3f}] times as fast, medians of {comparison.rounds} "
        "paired rounds\n"
        f"accepted {acceptance.accepted_share:.3f} of drafted tokens, {acceptance.alpha:.3f} a token; drafts of "
        f"{acceptance.draft_length:.2f} tokens, {acceptance.tokens_a_pass:.2f} tokens a pass; c = {comparison.c:.3f}\n"
        f"expected of that: {comparison.speed_up_by_tokens:.3f} by the rate a token, "
        f"{comparison.speed_up_by_share:.3f} by the share"
    )


def exit_faults(arguments: argparse.Namespace) -> list[str]:
    """What is wrong with the options of trained exits among themselves, a line each."""
    exits, layer, confidence = arguments.exits, arguments.exit_layer, arguments.exit_confidence
    faults = []
    if confidence is not None and exits is None:
        faults.append("--exit-confidence: needs --exits, the trained exits")
    if exits is not None and (layer is None) == (confidence is None):
        faults.append("--exits: needs either --exit-layer or --exit-confidence")
    if confidence is not None and (arguments.skip_layers or arguments.speculative is not None):
        faults.append("--exit-confidence: not with --skip-layers or --speculative")
    if confidence is not None and not 0 < confidence <= 1:
        faults.append(f"--exit-confidence {confidence}: must be above 0 and at most 1")
    if exits is not None:
        try:
            places = exits_record(exits)[1]["layers"]
            if layer is not None and layer not in places:
                there = ", ".join(map(str, places))
                faults.append(f"--exit-layer {layer}: there are trained exits after {there} layers")
        except CheckpointError as error:
            faults.append(f"--exits: {error}")
    return faults


def summary(stats: dict[str, float], drafted: bool, confidently: bool) -> str:
    """What writing has cost, from the statistics of either way to write."""
    said = f"{stats['tokens']} tokens in {stats['seconds']:.2f} s"
    if confidently:
        writers = [name for name in stats if name not in ("tokens", "seconds")]
        return f"{said}; written by " + ", ".join(f"{name}: {stats[name]:.1%}" for name in writers)
    acceptance = Acceptance.of(stats)
    said += f", {acceptance.tokens_a_pass:.2f} a pass"
    if drafted:
        said += (
            f"; {stats['accepted']} of {stats['drafted']} drafted tokens accepted ({acceptance.accepted_share:.3f}; "
            f"{acceptance.alpha:.3f} a token)"
        )
    return said


def run(arguments: argparse.Namespace) -> None:
    subject = checkpoint_subject(arguments.checkpoint, tokenizer=arguments.tokenizer)
    tokenizer = subject.tokenizer
    faults = faults_of(arguments, tokenizer) + exit_faults(arguments)
    draft = None
    try:
        draft = find_draft(arguments)
    except ValueError as error:
        faults.append(f"--speculative: {error}")
    if faults:
        raise InputError("\n".join(faults))
    prompts = [torch.tensor(tokenizer.encode(text).tolist()) for text in arguments.prompt]
    streams = [Stream(tokenizer, arguments.stop, show=len(prompts) == 1) for _ in prompts]
    model, exits = subject.load(), None
    if arguments.exits is not None:
        exits = load_exits(arguments.exits, model)
    if exits is not None and arguments.exit_layer is not None:
        model, arguments.exit_layer = exit_model(model, exits, arguments.exit_layer), None
    so_far: list[list[int]] = [[] for _ in prompts]

    def wrote(row: int, new: list[int]) -> None:
        so_far[row] += new
        streams[row].wrote(row, so_far[row])

    options: dict[str, Any] = {
        "temperature": arguments.temperature, "top_k": arguments.top_k, "top_p": arguments.top_p,
        "seed": arguments.seed, "max_length": arguments.max_length,
        "finished": lambda row, ids: streams[row].finished(row, ids),
    }  # fmt: skip
    parts = {"exit_layer": arguments.exit_layer, "skip_layers": arguments.skip_layers}
    drafting = {} if draft is None else draft.options()
    if len(prompts) == 1:
        print(arguments.prompt[0], end="", flush=True)
    try:
        if exits is not None and arguments.exit_confidence is not None:
            answers, stats = generate_confidently(
                model, exits, prompts, arguments.max_new_tokens, arguments.exit_confidence, **options, wrote=wrote
            )
        else:
            answers, stats = generate(
                model, prompts, arguments.max_new_tokens, **options, **parts, **drafting, wrote=wrote
            )
    except ValueError as fault:
        raise InputError(str(fault)) from None
    if len(prompts) == 1:
        print(streams[0].text(answers[0].tolist())[len(streams[0].printed) :])
    else:
        for i, (text, stream, ids) in enumerate(zip(arguments.prompt, streams, answers, strict=True), 1):
            print(f"--- {i}\n{text}{stream.text(ids.tolist())}")
    print(summary(stats, draft is not None, arguments.exit_confidence is not None), file=sys.stderr)
    if draft is not None and arguments.paired is not None:
        with tqdm(total=arguments.paired + 1, desc="paired rounds", unit="round", leave=False) as bar:
            found = compare(
                model, prompts, draft, arguments.max_new_tokens, arguments.paired, bar.update, **options, **parts
            )
        print(told(found), file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="…/checkpoint/step-N, or …/checkpoint for the newest")
    parser.add_argument("--tokenizer", help="folder, file or 'bytes'; default: the one kept beside the data")
    parser.add_argument("--prompt", action="append", required=True, help="repeatable; several are written side by side")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--top-k", type=int, help="only the k likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="only the likeliest tokens of this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--stop", action="append", default=[], help="string that ends an answer; repeatable")
    parser.add_argument("--exit-layer", type=int, help="only the first so many layers; with --exits the trained exit")
    parser.add_argument("--exits", metavar="DIR", help="trained exits of this checkpoint: outputs/RUN/exits")
    parser.add_argument(
        "--exit-confidence", type=float, metavar="P",
        help="with --exits: each token of the first exit that gives one token at least this probability",
    )  # fmt: skip
    parser.add_argument("--skip-layers", type=int, nargs="+", default=[], help="layers to leave out")
    parser.add_argument(
        "--max-length", type=int, help="tokens of a prompt with its answer that there is room for; default: all"
    )
    parser.add_argument(
        "--speculative", nargs="+", metavar="LAYER",
        help="layers that draft for the model; 3a, 3f: the attention, the feed-forward of layer 3; or a file of "
        "search_draft.py",
    )  # fmt: skip
    parser.add_argument("--draft-length", type=int, help="tokens that are drafted at a time; default: the file's, or 5")
    parser.add_argument(
        "--draft-exit", type=parse_exit, metavar="P",
        help="the draft stops behind a token of which it was less sure than this; 'adaptive': a threshold that follows "
        "what was accepted; 'none': never; default: the file's, or never",
    )  # fmt: skip
    parser.add_argument(
        "--paired", type=int, metavar="N", help="then write it N times with the draft and without, in turns: the time"
    )
    try:
        run(parser.parse_args())
    except (InputError, CheckpointError) as error:
        return tell(error)
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))
