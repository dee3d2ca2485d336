#!/bin/bash
# bash run_mpirun.sh [RANK_SIZE [HOSTFILE]]: Open MPI starts the ranks, 2 when nothing is said.
# A line of HOSTFILE is like "10.0.0.1 slots=8". Logs are in log_output/1/rank.N/stdout.
set -e
size=${1:-2}
[ -n "$DATA_PATH" ] && DATA_PATH=$(realpath "$DATA_PATH") && export DATA_PATH
[ -n "$2" ] && hosts=(--hostfile "$(realpath "$2")") || hosts=(--oversubscribe)
[ "$(id -u)" -ne 0 ] || hosts+=(--allow-run-as-root)
for name in DATA_PATH EPOCHS PYTHONPATH; do # mpirun takes to other hosts only what it is told to
    [ -z "${!name}" ] || hosts+=(-x "$name")
done
cd "$(dirname "$0")"

exec mpirun -n "$size" "${hosts[@]}" --bind-to none --output-filename "$PWD/log_output" --merge-stderr-to-stdout \
    "${PYTHON:-python3}" -u train.py
