#!/usr/bin/env bash
# All checks, in an environment of their own: bash tests/run.sh [options of pytest; default: -m 'not slow']
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash .ci/environment.sh test

# One thread: the models are tiny, and some tests run two processes
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ $# -gt 0 ] || set -- -m 'not slow'
.venv/bin/python -m ruff check grpo_ext examples tests notebooks
.venv/bin/python -m ruff format --check grpo_ext examples tests notebooks
exec .venv/bin/python -m pytest "$@"
