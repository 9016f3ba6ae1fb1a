r"""Turn text into packed shards, or verify shards.

    python scripts/prepare_data.py --input 'data/*.jsonl.zst' --tokenizer assets/llama3 --output data/corpus --workers 8
    python scripts/prepare_data.py --input hf:HuggingFaceTB/dclm-edu --filter 'edu_int_score>=3' \
        --tokenizer assets/llama3/tokenizer.model --validation-share 0.0005 --output data/dclm_edu --workers 32
    python scripts/prepare_data.py --verify data/dclm_edu

Stopped or killed at any moment, the same command goes on. Exit status: 0 done, 2 wrong input, 75 stopped by a signal
(run it again), 1 anything else.
"""

import argparse
import logging
import os
import sys

from regdrop_titan.data.packed import DataError, verify
from regdrop_titan.data.preparation import PreparationStopped, Signalled, prepare


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="PATH|GLOB|hf:NAME[:config]",
        help="JSONL (plain, .gz, .zst), Parquet, plain text: files, folders, globs; or hub data sets",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR|FILE|bytes",
        help="tokenizer.json, Llama-3's tokenizer.model, a folder with one, or bytes",
    )
    parser.add_argument("--output", metavar="DIR", help="folder of the packed set")
    parser.add_argument("--text-key", default="text", help="key or column of the text (default: text)")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="'COLUMN>=VALUE'",
        help="keep the records that fulfil it; may be given more than once",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="tokenizing processes (default: the cores of this machine, %(default)s)",
    )
    parser.add_argument("--shard-tokens", type=int, default=2**28, help="tokens of a shard (default: %(default)s)")
    parser.add_argument(
        "--validation-share",
        type=float,
        default=0.0,
        metavar="F",
        help="share of documents held out into OUTPUT/validation (default: none)",
    )
    parser.add_argument(
        "--on-bad-record",
        choices=["error", "skip"],
        default="error",
        help="stop at a bad record, naming it, or leave it out and list it in the manifest",
    )
    parser.add_argument("--eos-token", help="end-of-text, where the tokenizer's files do not name it")
    parser.add_argument("--verify", metavar="DIR", help="check every shard of a packed set against its hash, and stop")
    arguments = parser.parse_args()
    if arguments.verify is None:
        missing = [name for name in ("input", "tokenizer", "output") if getattr(arguments, name) is None]
        if missing:
            parser.error("needed: " + ", ".join(f"--{name}" for name in missing) + " (or --verify DIR)")
    return arguments


def main() -> int:
    from torchtitan.tools.logging import init_logger  # after regdrop_titan, which fixes TorchTitan's device

    arguments = parse()
    init_logger()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        if arguments.verify is not None:
            manifest = verify(arguments.verify)
            print(
                f"{arguments.verify}: {len(manifest['shards'])} shards, {manifest['tokens']:,} tokens, all as written"
            )
            return 0
        prepare(
            arguments.input, arguments.tokenizer, arguments.output, text_key=arguments.text_key,
            filters=arguments.filter, workers=arguments.workers, shard_tokens=arguments.shard_tokens,
            validation_share=arguments.validation_share, on_bad_record=arguments.on_bad_record,
            eos_token=arguments.eos_token,
        )  # fmt: skip
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Signalled as stopped:
        print(stopped, file=sys.stderr)
        return 75
    except KeyboardInterrupt:  # before the first block; later ones are signals.py's
        print("stopped; what was committed is safe, the same command goes on from there", file=sys.stderr)
        return 75
    except PreparationStopped as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
