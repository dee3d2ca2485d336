#!/bin/bash
# bash run.sh [MODEL] [TEXT]
#   MODEL: folder of a GPT-2 with its tokenizer, or "" for a small one that knows letters.
#   TEXT: a text file; without it, the program itself.
set -e
[ -n "$1" ] && export MODEL="$(realpath "$1")"
[ -n "$2" ] && export TEXT="$(realpath "$2")"
cd "$(dirname "$0")"

exec msrun --worker_num=2 --join=True --log_dir=./log_output train.py
