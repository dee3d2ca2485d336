#!/bin/bash
# bash run.sh [TEXT]
#   TEXT: a text file; without it, the program itself.
set -e
[ -n "$1" ] && export TEXT="$(realpath "$1")"
cd "$(dirname "$0")"

exec msrun --worker_num=8 --local_worker_num=8 --join=True --log_dir=./log_output train.py
