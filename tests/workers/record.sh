#!/bin/bash
# Write the arguments, one to a NUL-ended field, and the rank.
printf '%s\0' "$@" > "args_$RANK"
exit 0
