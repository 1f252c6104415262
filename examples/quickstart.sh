#!/usr/bin/env bash
# From nothing to a trained model: bash examples/quickstart.sh [options of examples/train_gsm8k.py]
# Installs into .venv the first time. Needs Python 3.11 and a network for that, and neither accelerator nor network after.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash .ci/environment.sh plot

export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 # the model is in the repository
# So small a model gains nothing from a second device or thread, and threads on a busy machine wait for each other
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
echo "training a model of 0.35 M parameters on word problems, about a minute on a CPU core ..."
exec .venv/bin/python examples/train_gsm8k.py --config examples/configs/quickstart.yaml "$@"
