#!/bin/bash
# bash run.sh [DATA_PATH]
#   DATA_PATH: folder with the four MNIST idx files; without it, scikit-learn's handwritten digits.
set -e
[ -n "$1" ] && export DATA_PATH="$(realpath "$1")"
cd "$(dirname "$0")"

exec msrun --worker_num=4 --local_worker_num=4 --join=True --log_dir=./log_output train.py
