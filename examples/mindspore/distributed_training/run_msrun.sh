#!/bin/bash
# bash run_msrun.sh [DATA_PATH] [WORKERS] [SCRIPT]: what run.sh does under msrun, with any number of workers.
# SCRIPT: networks.py or checkpoints.py in place of the training.
set -e
[ -n "$1" ] && DATA_PATH="$(realpath "$1")"
cd "$(dirname "$0")"
export DATA_PATH=${DATA_PATH:-$(python3 left_open.py)}

exec msrun --worker_num="${2:-8}" --local_worker_num="${2:-8}" --join=True --log_dir=./log_output \
    ${3:-pytest -s resnet50_distributed_training.py}
