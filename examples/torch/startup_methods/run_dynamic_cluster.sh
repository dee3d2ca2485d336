#!/bin/bash
# bash run_dynamic_cluster.sh [WORKER_NUM [SCHED_HOST FIRST COUNT]]: a scheduler and its workers, started one by one.
# Logs are in ./log_output. Without SCHED_HOST, all 2 or WORKER_NUM of them are on this host. With several hosts, each
# starts COUNT workers from rank FIRST on, and the one with rank 0 the scheduler; SCHED_HOST is its address,
# MS_SCHED_PORT (8118) its port.
#   host 1: bash run_dynamic_cluster.sh 16 10.0.0.1 0 8
#   host 2: bash run_dynamic_cluster.sh 16 10.0.0.1 8 8
here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=ranks.sh
. "$here/ranks.sh"

logs=$PWD/log_output
export DATA_PATH=${DATA_PATH:+$(realpath "$DATA_PATH")} MS_WORKER_NUM=${1:-2}
if [ -n "$2" ]; then
    export MS_SCHED_HOST=$2 MS_SCHED_PORT=${MS_SCHED_PORT:-8118}
    first=${3:?give the first rank of this host} count=${4:?give the number of workers of this host}
else
    export MS_SCHED_HOST=127.0.0.1 MS_SCHED_PORT=${MS_SCHED_PORT:-$(free_port)}
    first=0 count=$MS_WORKER_NUM
fi

if [ "$first" -eq 0 ]; then
    export MS_ROLE=MS_SCHED
    start "scheduler" "$logs/scheduler" scheduler.log "$python" -u "$here/train.py"
fi
export MS_ROLE=MS_WORKER
for ((i = first + count - 1; i >= first; i--)); do
    export MS_NODE_ID=$i
    start "worker $i" "$logs/worker_$i" "worker_$i.log" "$python" -u "$here/train.py"
done
show "$logs/worker_$first" "worker_$first.log"
finish
