#!/bin/bash
# bash msrun_2.sh MASTER_ADDR [DATA_PATH]: the second of two hosts; MASTER_ADDR is the address of the first.
set -e
master=${1:?give the address of the first host}
[ -n "$2" ] && DATA_PATH=$(realpath "$2") && export DATA_PATH
cd "$(dirname "$0")"

exec msrun --worker_num=2 --local_worker_num=1 --master_addr="$master" --node_rank=1 --cluster_time_out=300 \
    --join=True --log_dir=./log_output train.py
