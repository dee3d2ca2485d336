#!/bin/bash
# bash run.sh [DATA_PATH] [MODE]
#   DATA_PATH: folder with the four MNIST idx files; without it, or with "", scikit-learn's handwritten digits.
#   MODE: data, optimizer (without it), operator, pipeline, accumulate, copies, recompute or fusion.
set -e
[ -n "$1" ] && export DATA_PATH="$(realpath "$1")"
cd "$(dirname "$0")"

exec msrun --worker_num=8 --local_worker_num=8 --join=True --log_dir=./log_output train.py --mode "${2:-optimizer}"
