#!/usr/bin/env bash
# Make .venv in the repository root, with the pinned packages and one extra: bash .ci/environment.sh plot|test
# PYTHON names the interpreter to make it from; default: python3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=$1
interpreter=${PYTHON:-python3.11}
python=.venv/bin/python

# A run that was cut short leaves a .venv without pip
if ! "$python" -m pip --version >/dev/null 2>&1; then
    if ! "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: $interpreter does not run; install Python 3.11, or name another: PYTHON=/path/to/python bash $0" >&2
        exit 1
    fi
    echo "making .venv with $("$interpreter" --version)"
    if ! "$interpreter" -m venv --clear .venv; then
        echo "error: $interpreter cannot make a virtual environment; on Debian: apt install python3.11-venv" >&2
        exit 1
    fi
fi

# The stamp says what was installed, and for which folder
stamp=.venv/installed-$extra
wanted=$(pwd && cat .ci/constraints.txt setup.cfg pyproject.toml)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing grpo_ext[$extra] into .venv (some minutes, once) ..."
    rm -f "$stamp"
    "$python" -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e ".[$extra]"
    printf '%s\n' "$wanted" >"$stamp"
fi
