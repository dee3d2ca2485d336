#!/bin/bash
# bash run.sh [DATA_PATH]
#   DATA_PATH: folder with the four MNIST idx files; without it, scikit-learn's handwritten digits.
set -e
[ -n "$1" ] && export DATA_PATH="$(realpath "$1")"
cd "$(dirname "$0")"

exec msrun --rehearse 3x2 --spares 1 --max_restarts 3 \
  --forward_env DATA_PATH --forward_env EPOCHS --forward_env SAVE_EVERY --forward_env PRINT_EVERY train.py
