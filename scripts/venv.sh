# Sourced by quickstart.sh and test.sh: makes .venv in the project's root where it is missing or out of date, and
# activates it. PYTHON names the interpreter to make it from (default: the first of python3, python3.13 ... 3.11
# that is 3.11 or newer).

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python $0" >&2
    return 1
}

# The environment is up to date when it was installed from these very files.
wanted="$(cat pyproject.toml constraints.txt scripts/venv.sh | sha256sum | cut -d ' ' -f 1)"
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    python="$(find_python)"
    echo "Installing into .venv (about 2 GB; minutes, by the network)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv || {
        echo "error: '$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    }
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
    echo "$wanted" >.venv/installed
fi
. .venv/bin/activate
