#!/bin/bash
# bash run.sh [DATA_PATH] [WAY]
#   DATA_PATH: folder with train.txt and test.txt in Criteo's format, or "" for made-up clicks.
#   WAY: device (everything on the rank's device), host (the tables of categories on the host), lookup (each
#   rank has a part of them), or server (on two parameter servers).
set -e
[ -n "$1" ] && export DATA_PATH="$(realpath "$1")"
cd "$(dirname "$0")"

way="${2:-host}"
servers=0
[ "$way" = server ] && servers=2

exec msrun --worker_num=4 --local_worker_num=4 --server_num=$servers --join=True --log_dir=./log_output train.py --way="$way"
