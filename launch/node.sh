#!/usr/bin/env bash
# All runs of a profile, or some, on a node of one's own: launch/node.sh [reproduce.sh's options, e.g. --only main-1.5b]
# What broke off goes on by itself, up to TRIES times in a row (20). It ends when all are made (0), for a request that cannot be met (2), with
# --wall-clock, SIGTERM or SIGUSR1 (75: the same command goes on), at numbers that are not finite (65: the same would follow), and at Ctrl-C (130).
set -uo pipefail
set -m                                                      # the run in a process group of its own, to which Ctrl-C is passed on once
cd "$(dirname "${BASH_SOURCE[0]}")/.."
child= stop=
tell() { [[ -n $child ]] && kill "-$1" -- "-$child" 2>/dev/null; stop=${stop:-$2}; }
trap 'tell USR1 75' USR1
trap 'tell TERM 75' TERM
trap 'tell INT 130' INT
for ((try = 1; try <= ${TRIES:-20}; try++)); do
    ./reproduce.sh --profile "${PROFILE:-h100}" "$@" &
    child=$!
    wait "$child"; code=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done   # a signal ends `wait`, not the run
    child=
    case $code in 0 | 2 | 65 | 75 | 130) exit "$code" ;; esac
    [[ -n $stop ]] && exit "$stop"
    echo "launch/node.sh: ended with $code, try $try; going on from the checkpoints in a minute" >&2
    sleep "${WAIT:-60}" & wait $!; kill $! 2>/dev/null
    [[ -n $stop ]] && exit "$stop"
done
exit "$code"
