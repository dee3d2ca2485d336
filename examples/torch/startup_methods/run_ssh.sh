#!/bin/bash
# bash run_ssh.sh HOSTS [DATA_PATH]: all hosts with one command, over SSH. HOSTS is like h1:8,h2:8.
# The folder of this example, and DATA_PATH, must be at the same place on all hosts.
set -e
hosts=${1:?give the hosts, as in h1:8,h2:8}
[ -n "$2" ] && DATA_PATH=$(realpath "$2") && export DATA_PATH
cd "$(dirname "$0")"

env=()
for name in DATA_PATH EPOCHS; do # other hosts get what they are to get
    [ -z "${!name}" ] || env+=(--env="$name")
done
exec msrun --hosts="$hosts" "${env[@]}" --log_dir=./log_output train.py
