#!/bin/bash
# bash run.sh [DATA_PATH] [WORKERS]
#   DATA_PATH: folder with the four MNIST idx files; without it, scikit-learn's handwritten digits.
#   WORKERS: 8 in the document.
set -e
[ -n "$1" ] && DATA_PATH="$(realpath "$1")"
cd "$(dirname "$0")"
export DATA_PATH=${DATA_PATH:-$PWD/data}
[ -d "$DATA_PATH" ] || python3 -m msrun.data.digits "$DATA_PATH"

exec msrun --worker_num="${2:-8}" --local_worker_num="${2:-8}" --join=True --log_dir=./log_output train.py
