#!/usr/bin/env bash
# All runs of a profile, or some, on a node of one's own: launch/node.sh [reproduce.sh's options, e.g. --only main-1.5b]
# What was cut short goes on by itself, up to TRIES times in a row (20); a request that cannot be met (2) and Ctrl-C (130) end it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for ((try = 1; try <= ${TRIES:-20}; try++)); do
    ./reproduce.sh --profile "${PROFILE:-h100}" "$@"
    code=$?
    [[ $code == 0 || $code == 2 || $code == 130 ]] && exit "$code"
    echo "launch/node.sh: ended with $code, try $try; going on from the checkpoints in a minute" >&2
    sleep "${WAIT:-60}"
done
exit "$code"
