#!/bin/bash
# bash run.sh
cd "$(dirname "$0")"
exec msrun --worker_num=2 --join=True --log_dir=./log_output train.py
