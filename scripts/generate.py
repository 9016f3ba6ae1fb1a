r"""Text from a checkpoint, as it is written.

    python scripts/generate.py --checkpoint outputs/RUN/checkpoint --prompt "def main("
    python scripts/generate.py --checkpoint outputs/RUN/checkpoint --prompt "def main(" --exit-layer 8
    python scripts/generate.py --checkpoint outputs/RUN/checkpoint --prompt "def main(" --speculative 0 1 3
    python scripts/generate.py --checkpoint outputs/RUN/checkpoint --prompt "def main(" --exits outputs/RUN/exits \
        --exit-confidence 0.9

Greedy unless --temperature is above 0. With --speculative these layers draft for the whole model: the text is the same,
and what it cost is told at the end.
"""

import argparse
import sys

import torch

from regdrop_titan.adapters import exit_model, load_exits
from regdrop_titan.adapters.balcony import exits_record
from regdrop_titan.checkpoints import CheckpointError
from regdrop_titan.data.tokenizers import Tokenizer
from regdrop_titan.evaluation.subjects import InputError, checkpoint_subject, tell
from regdrop_titan.generation import generate, generate_confidently
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


def run(arguments: argparse.Namespace) -> None:
    subject = checkpoint_subject(arguments.checkpoint, tokenizer=arguments.tokenizer)
    tokenizer = subject.tokenizer
    faults = [f"--prompt {i}: is empty" for i, text in enumerate(arguments.prompt, 1) if not text]
    faults += ["--stop: a stop string is empty" for stop in arguments.stop if not stop]
    faults += exit_faults(arguments)
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

    if len(prompts) == 1:
        print(arguments.prompt[0], end="", flush=True)
    try:
        options = {
            "top_k": arguments.top_k, "top_p": arguments.top_p, "seed": arguments.seed, "wrote": wrote,
            "finished": lambda row, ids: streams[row].finished(row, ids),
        }  # fmt: skip
        if arguments.exit_confidence is not None:
            answers, stats = generate_confidently(
                model, exits, prompts, arguments.max_new_tokens, arguments.exit_confidence, arguments.temperature,
                **options,
            )  # fmt: skip
        else:
            answers, stats = generate(
                model, prompts, arguments.max_new_tokens, arguments.temperature, arguments.exit_layer,
                arguments.skip_layers, arguments.speculative, arguments.draft_length, **options,
            )  # fmt: skip
    except ValueError as fault:
        raise InputError(str(fault)) from None
    if len(prompts) == 1:
        print(streams[0].text(answers[0].tolist())[len(streams[0].printed) :])
    else:
        for i, (text, stream, ids) in enumerate(zip(arguments.prompt, streams, answers, strict=True), 1):
            print(f"--- {i}\n{text}{stream.text(ids.tolist())}")
    said = f"{stats['tokens']} tokens in {stats['seconds']:.2f} s"
    if arguments.exit_confidence is not None:
        writers = [name for name in stats if name not in ("tokens", "seconds")]
        said += "; written by " + ", ".join(f"{name}: {stats[name]:.1%}" for name in writers)
    else:
        said += f", {stats['tokens'] / stats['passes']:.2f} a pass"
    if stats.get("drafted"):
        said += f"; {stats['accepted']} of {stats['drafted']} drafted tokens accepted"
    print(said, file=sys.stderr)


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
    parser.add_argument("--speculative", type=int, nargs="+", metavar="LAYER", help="layers that draft for the model")
    parser.add_argument("--draft-length", type=int, default=5, help="tokens that are drafted at a time")
    try:
        run(parser.parse_args())
    except (InputError, CheckpointError) as error:
        return tell(error)
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))
