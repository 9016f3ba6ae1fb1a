# Sourced first by experiments on the standard library's corpus that take [--jobs N] and nothing else: sets `jobs` (default: 2),
# goes to the project's root, makes the environment and the corpus. --help shows the comment that the script begins with.

jobs=2
while (($#)); do
    case "$1" in
        --jobs)
            [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || { echo "error: --jobs needs a number of at least 1" >&2; exit 2; }
            jobs="$2"
            shift 2
            ;;
        -h | --help)
            sed -n '2,/^[^#]/s/^# //p' "$0"
            exit 0
            ;;
        *)
            echo "error: unknown argument $1 (see --help)" >&2
            exit 2
            ;;
    esac
done
cd "$(dirname "$0")/../.."
. scripts/venv.sh

# once, before runs start side by side; by -c: from standard input the processes that tokenize would look for a file
python -c 'from pathlib import Path
from regdrop_titan.data.stdlib_corpus import build_stdlib_corpus
build_stdlib_corpus(Path("data/stdlib"))'
