# shellcheck shell=bash
# Sourced by the scripts that start every rank themselves. All processes are ended when one fails or the script is.

umask 077 # environment and logs are nobody else's business
set -m    # every process gets a process group of its own, which its own children end with

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # as torchrun: ranks share the cores
python=${PYTHON:-python3}
groups=()

# start NAME FOLDER LOG COMMAND...: run a command in the background, in a folder of its own.
start() {
    local name=$1 folder=$2 log=$3
    shift 3
    rm -rf "$folder"
    mkdir -p "$folder"
    (
        cd "$folder" || exit
        env >"env.log"
        "$@" >"$log" 2>&1 </dev/null
        status=$?
        [ $status -eq 0 ] || echo "$name failed with exit code $status, see $folder/$log" >&2
        exit $status
    ) &
    groups+=($!)
}

# show FOLDER LOG: copy a log to the console until the newest process has ended.
show() {
    touch "$1/$2"
    tail -q -n +1 -f -s 0.1 --pid="${groups[-1]}" "$1/$2" &
    groups+=($!)
}

# free_port: print a port that nobody uses now.
free_port() {
    "$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

# finish: wait for all processes; the status is that of the first that fails.
finish() {
    local status=0 group
    for group in "${groups[@]}"; do # as many times as there are processes
        : "$group"
        wait -n || { status=$?; break; }
    done
    if [ $status -eq 0 ]; then
        echo "training success"
    else
        echo "training failed"
    fi
    exit $status
}

end_all() {
    trap - EXIT
    local group signal
    for signal in TERM KILL; do
        for group in "${groups[@]}"; do
            kill -s $signal -- "-$group"
        done
        for _ in {1..50}; do
            [ -n "$(jobs -r)" ] || break
            sleep 0.1
        done
    done
    wait
} 2>/dev/null

trap end_all EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
