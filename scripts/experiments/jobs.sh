# Sourced by experiments that take [--jobs N] and nothing else: sets `jobs` (default: 2). --help shows the comment that the
# script begins with.

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
