#!/usr/bin/env bash
# One run of a profile a job, on Slurm, from the project's folder:
#     n=$(./reproduce.sh --profile h100 --plan --json | grep -c '"fits": true')
#     sbatch --array=0-$((n - 1))%4 launch/slurm.sh [PROFILE]
# A quarter of an hour before the limit, or when it is to make room, the run writes a checkpoint, and the job is put back into the queue.
#SBATCH --job-name=logra
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=128
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logra-%A_%a.log
set -uo pipefail
profile="${1:-h100}"
cd "${SLURM_SUBMIT_DIR:?this is for sbatch; on a node of your own use launch/node.sh}"

# the name of the run with this job's number, of those that fit the cards
name=$(./reproduce.sh --profile "$profile" --plan --json | .venv/bin/python -c '
import json, sys
print([run["name"] for run in json.load(sys.stdin)["runs"] if run["fits"]][int(sys.argv[1])])' "${SLURM_ARRAY_TASK_ID:?give --array}") || exit 2

# the limit by the clock as well, less five minutes for the last checkpoint: an update that is longer than the signal's notice must not be begun
left=$(squeue --noheader --job "$SLURM_JOB_ID" --format %L)
limit=()
if [[ "$left" =~ ^[0-9:-]+$ ]]; then
    seconds=$(.venv/bin/python -c '
import runpy, sys
print(max(0, int(runpy.run_path("logra/rl/stopping.py")["seconds"](sys.argv[1])) - 300))' "$left") || exit 2
    limit=(--wall-clock "$seconds")
fi

./reproduce.sh --profile "$profile" --only "$name" "${limit[@]}" &
child=$!
trap 'kill -USR1 "$child" 2>/dev/null' USR1 TERM
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done   # a signal ends `wait`, not the run
if [[ $code == 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
