#!/bin/bash
# bash msrun_single.sh [DATA_PATH]: two workers on this host.
set -e
[ -n "$1" ] && DATA_PATH=$(realpath "$1") && export DATA_PATH
cd "$(dirname "$0")"

exec msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=./log_output train.py
