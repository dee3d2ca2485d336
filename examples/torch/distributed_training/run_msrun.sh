#!/bin/bash
# bash run_msrun.sh DATA_PATH RANK_SIZE [MSRUN_OPTION]...: all ranks under msrun, logs in ./log_output.
#   one host:      bash run_msrun.sh /path/dataset 8
#   several hosts: bash run_msrun.sh /path/dataset 16 --hosts h1:8,h2:8
# SCRIPT=resnet50_distributed_training_grad_accu.py, or ..._gpu.py, runs another script.
here=$(dirname "$(realpath "$0")")
if [ $# -lt 2 ]; then
    echo "bash run_msrun.sh DATA_PATH RANK_SIZE [MSRUN_OPTION]..., as in: bash run_msrun.sh /path/dataset 8" >&2
    exit 2
fi
export DATA_PATH=${1:+$(realpath "$1")}
exec msrun --worker_num="$2" "${@:3}" "$here/${SCRIPT:-resnet50_distributed_training.py}"
