# shellcheck shell=bash
# Sourced by run.sh and run_cluster.sh, with their arguments: what the document leaves open.
folder=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
name=$(basename "$0")
if [ "$name" = run.sh ]; then # DATA_PATH [RANK_SIZE]; without DATA_PATH, scikit-learn's digits as CIFAR-10's files
    [ -f "$folder/rank_table_${2:-8}pcs.json" ] && [ "${2:-8}" != 16 ] ||
        { echo "run.sh: RANK_SIZE is 2 or 8, not $2: the document has no other table; see run_msrun.sh" >&2; exit 2; }
    set -- "${1:+$(realpath "$1")}" "${2:-8}"
    cd "$folder" || exit
elif [ ! -f "$2" ] || [ -z "$4" ]; then
    echo "run_cluster.sh: DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START are missing, or no file $2" >&2
    exit 2
else
    set -- "${1:+$(realpath "$1")}" "$(realpath "$2")" "$3" "$4"
fi
# Without MindSpore, its name finds msrun.mindspore.
python3 -c 'import mindspore' 2>/dev/null ||
    PYTHONPATH=$(python3 -c 'import msrun, os; print(os.path.join(msrun.__path__[0], "mindspore", "posing"))')${PYTHONPATH:+:$PYTHONPATH} ||
    { echo "$name: python3 has neither mindspore nor msrun; pip install 'msrun[examples]'" >&2; exit 2; }
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} # of left_open.py
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}          # ranks share the cores
[ -n "$1" ] || set -- "$(python3 "$folder/left_open.py")" "${@:2}"
