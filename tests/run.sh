#!/usr/bin/env bash
# All checks, in an environment of their own: bash tests/run.sh [options of pytest; default: -m 'not slow']
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash .ci/environment.sh test

# One thread: the models are tiny, and some tests run two processes
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/python -m ruff check grpo_ext examples tests notebooks
.venv/bin/python -m ruff format --check grpo_ext examples tests notebooks
[ $# -eq 0 ] || exec .venv/bin/python -m pytest "$@"

# Two halves beside each other, since most tests keep one core busy
first=(tests/test_grid.py tests/test_lora.py tests/test_notebooks.py tests/test_resume.py)
output=$(mktemp)
trap 'kill "$!" 2>/dev/null || true; rm -f "$output"' EXIT
.venv/bin/python -m pytest -m 'not slow' -p no:cacheprovider "${first[@]}" >"$output" 2>&1 &
status=0
.venv/bin/python -m pytest -m 'not slow' "${first[@]/#/--ignore=}" || status=$?
wait "$!" || status=$?
cat "$output"
exit "$status"
