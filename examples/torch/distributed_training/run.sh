#!/bin/bash
# bash run.sh DATA_PATH RANK_SIZE: the ranks of a rank table on this host; RANK_SIZE is 2 or 8.
# DATA_PATH "" is scikit-learn's digits. Rank i runs in ./device<i>, with env.log and train.log<i> there.
# MODE=data_parallel, semi_auto or hybrid; RUNNER="python3 -m pytest -s -v" runs the script as the document does.
here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=../startup_methods/ranks.sh
. "$here/../startup_methods/ranks.sh"

if [ $# -ne 2 ] || [ ! -f "$here/rank_table_$2pcs.json" ]; then
    echo "bash $(basename "$0") DATA_PATH RANK_SIZE, as in: bash $(basename "$0") /path/dataset 8; RANK_SIZE is 2 or 8" >&2
    exit 2
fi
export DATA_PATH=${1:+$(realpath "$1")}
export RANK_SIZE=$2 RANK_TABLE_FILE=$here/rank_table_$2pcs.json
MASTER_PORT=${MASTER_PORT:-$(free_port)}
export MASTER_PORT
script=$here/${SCRIPT:-resnet50_distributed_training.py}
read -ra runner <<<"${RUNNER:-$python -u}"

for ((i = RANK_SIZE - 1; i >= 0; i--)); do
    export DEVICE_ID=$i RANK_ID=$i
    echo "start training for device $i"
    start "rank $i" "$PWD/device$i" "train.log$i" "${runner[@]}" "$script"
done
show "$PWD/device0" train.log0
finish
