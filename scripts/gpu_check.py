"""What `scripts/gpu_check.sh` calls: looks first whether all is installed that it needs, which is all at once told."""

import re
import signal
import sys
import tomllib
from importlib import metadata
from pathlib import Path

# fla-core's checks are told to lack it; nothing here logs to W&B
OPTIONAL = {"fla-core", "wandb"}


def missing(requirements: list[str]) -> list[str]:
    """Those that are not installed, whatever their version."""
    found = []
    for requirement in requirements:
        match = re.match(r"[\w.-]+", requirement)
        assert match is not None
        if match[0] in OPTIONAL:
            continue
        try:
            metadata.version(match[0])
        except metadata.PackageNotFoundError:
            found.append(requirement.split(";")[0].strip())
    return found


def main() -> int:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    if lacking := missing(project["dependencies"]):
        print(
            f"missing packages: {', '.join(lacking)}\n"
            "from a folder of wheels (docs/gpu_check.md tells how to make one):\n"
            f"  python -m pip install --no-index --find-links wheels {' '.join(map(repr, lacking))}",
            file=sys.stderr,
        )
        return 2
    from regdrop_titan.gpu_check.command import main as check

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that no process is left behind
    return check(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
