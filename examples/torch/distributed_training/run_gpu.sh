#!/bin/bash
# bash run_gpu.sh DATA_PATH RANK_SIZE [HOSTFILE]: the script for GPUs under mpirun, one process per GPU.
# DEVICE_TARGET=CPU tries it without GPUs.
here=$(dirname "$(realpath "$0")")
if [ $# -lt 2 ]; then
    echo "bash run_gpu.sh DATA_PATH RANK_SIZE [HOSTFILE], as in: bash run_gpu.sh /path/dataset 8" >&2
    exit 2
fi
export DATA_PATH=${1:+$(realpath "$1")}
words=(-n "$2" --oversubscribe -x DATA_PATH)
[ -n "$3" ] && words+=(--hostfile "$3")
[ "$(id -u)" = 0 ] && words+=(--allow-run-as-root)
exec mpirun "${words[@]}" "${PYTHON:-python3}" -u "$here/resnet50_distributed_training_gpu.py"
