#!/bin/bash
# bash run.sh [WORKERS]
set -e
cd "$(dirname "$0")"

exec msrun --worker_num="${1:-8}" --local_worker_num="${1:-8}" --join=True --log_dir=./log_output train.py
