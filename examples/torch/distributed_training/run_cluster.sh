#!/bin/bash
# bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START: this host's ranks of a rank table.
#   host 1: bash run_cluster.sh /path/dataset /path/rank_table_16pcs.json 16 0
#   host 2: bash run_cluster.sh /path/dataset /path/rank_table_16pcs.json 16 8
# Put the addresses of your hosts into the table. Rank i runs in ./device_<i>, with train<i>.log there.
here=$(dirname "$(realpath "$0")")
TRAIN=${SCRIPT:-resnet50_distributed_training.py}
TRAIN=$here/$TRAIN exec bash "$here/../startup_methods/run_cluster.sh" "$@"
