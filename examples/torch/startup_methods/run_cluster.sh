#!/bin/bash
# bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START: this host's ranks of a rank table.
#   host 1: bash run_cluster.sh /path/dataset /path/rank_table.json 16 0
#   host 2: bash run_cluster.sh /path/dataset /path/rank_table.json 16 8
# DATA_PATH "" is scikit-learn's digits. RANK_START is the first rank of this host; how many it has, and on which
# devices, the table says. Hosts wait MS_TOPO_TIMEOUT seconds for each other (1800).
here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=ranks.sh
. "$here/ranks.sh"

if [ $# -ne 4 ]; then
    echo "bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START, as in: bash run_cluster.sh /path/dataset" \
        "/path/rank_table.json 16 0" >&2
    exit 2
fi
export DATA_PATH=${1:+$(realpath "$1")}
RANK_TABLE_FILE=$(realpath "$2")
export RANK_TABLE_FILE RANK_SIZE=$3

ranks=$("$python" - "$RANK_TABLE_FILE" "$4" <<'PROGRAM'
import sys

from ranktable import RankTableError, read_table

path, first = sys.argv[1], int(sys.argv[2])
try:
    server = read_table(path).server_of(first)
except RankTableError as error:
    sys.exit(f"run_cluster.sh: {error}")
if first != server.ranks[0]:
    sys.exit(f"run_cluster.sh: RANK_START {first}: server {server.server_id} begins with rank {server.ranks[0]}")
for device in sorted(server.devices, key=lambda device: -device.rank_id):
    print(device.rank_id, device.device_id)
PROGRAM
) || exit 2

while read -r RANK_ID DEVICE_ID; do
    export RANK_ID DEVICE_ID
    echo "start training for rank $RANK_ID on device $DEVICE_ID"
    start "rank $RANK_ID" "$PWD/device_$RANK_ID" "train$RANK_ID.log" "$python" -u "${TRAIN:-$here/train.py}"
done <<<"$ranks"
show "$PWD/device_$4" "train$4.log"
finish
