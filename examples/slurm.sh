#!/bin/bash
#SBATCH --job-name=penstock --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32
#SBATCH --exclusive --time=7-00:00:00
#SBATCH --no-kill --signal=B:TERM@60
# This script runs on the first node of the job: Ray's head and the launcher are there.
set -euo pipefail

# shellcheck source=/dev/null
source "$HOME/penstock/.venv/bin/activate" # on a file system that every node sees
model=${1:?usage: sbatch slurm.sh MODEL}
nodes=${SLURM_JOB_NUM_NODES:?}
host=$(hostname --ip-address | tr ' ' '\n' | grep --max-count=1 --fixed-strings .) # IPv4
export RAY_TMPDIR=/tmp/ray-${SLURM_JOB_ID:?} # of this job; symmetric-run finds no `--temp-dir`
export RAY_AUTH_MODE=token # or whoever reaches Ray's ports can run what he likes
ray get-auth-token --generate > /dev/null # in the home folder, before all nodes want it at once

# Ray starts on every node, runs the launcher on the head when all have come, and ends with it, on the
# other nodes a minute later; a node that is lost is no reason to end the others.
srun --kill-on-bad-exit=0 ray symmetric-run --address="$host:6379" --min-nodes="$nodes" \
  --num-cpus="${SLURM_CPUS_PER_TASK:?}" --num-gpus="${SLURM_GPUS_ON_NODE:?}" --disable-usage-stats -- \
  launch all --backend ray --address="$host:6379" --tp 8 --dp "$nodes" --model "$model" \
  --curve-keys "$HOME/penstock-keys" --endpoint tcp://0.0.0.0:5555 &
trap 'launch stop' TERM # a minute before the time is up
wait $! || wait $! # the signal ends the first one
