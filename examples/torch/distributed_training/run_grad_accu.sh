#!/bin/bash
# bash run_grad_accu.sh DATA_PATH RANK_SIZE: run.sh with gradient accumulation.
SCRIPT=resnet50_distributed_training_grad_accu.py exec bash "$(dirname "$(realpath "$0")")/run.sh" "$@"
