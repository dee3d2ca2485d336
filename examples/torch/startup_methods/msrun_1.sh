#!/bin/bash
# bash msrun_1.sh MASTER_ADDR [DATA_PATH]: the first of two hosts; MASTER_ADDR is its own address.
set -e
master=${1:?give the address of the first host}
[ -n "$2" ] && DATA_PATH=$(realpath "$2") && export DATA_PATH
cd "$(dirname "$0")"

exec msrun --worker_num=2 --local_worker_num=1 --master_addr="$master" --node_rank=0 --cluster_time_out=300 \
    --join=True --log_dir=./log_output train.py
