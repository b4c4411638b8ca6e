#!/bin/bash
# One run on a Slurm cluster:   sbatch --nodes=3 --job-name=math examples/clusters/slurm.sh configs/math.toml [name=value ...]
#
# Every node starts Ray, and the first one runs streamppo. The folder in which sbatch is called, and HOME, must be on a
# disk that all nodes see under the same path, and runs/ on a disk of the first node (docs/clusters.md). GPUs are asked for
# by --gpus-per-node. The job's name is that of the run: the same command continues it. A job that is preempted, or runs out
# of time, has two minutes to save a checkpoint.
#
# If the nodes share only a network disk (NFS, Lustre):   COPIES=$PWD/copies sbatch ...
# The run's folder is then on the first node's own disk (in RUNS, by default /tmp), and a later job restores it from
# $COPIES, which also has the trained model.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

runs=runs
if [ -n "${COPIES:-}" ]; then
    # Not the folder of an earlier start, which may be older than the copies.
    runs="${RUNS:-/tmp}/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    mkdir -p "$runs"
fi
run="$runs/$SLURM_JOB_NAME"
# No `| head -n 1`: it would close the pipe, and pipefail would end the job.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
address="$head:${RAY_PORT:-6379}"
# A run cannot set these from outside of Ray: no record of each call, and no nice value.
export RAY_task_events_report_interval_ms=0 RAY_worker_niceness=0
# Who reaches Ray's ports and has this token runs code as this user. It lies in HOME, closed to others.
export RAY_AUTH_MODE=token
ray get-auth-token --generate > /dev/null

nodes=()
trap 'kill "${nodes[@]}" 2> /dev/null || true' EXIT
srun --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$head" --port="${address##*:}" --include-dashboard=false --block &
nodes+=($!)
for _ in $(seq 60); do ray status --address "$address" > /dev/null 2>&1 && break || sleep 2; done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --nodes="$others" --ntasks="$others" --exclude="$head" ray start --address="$address" --block &
    nodes+=($!)
fi

options=("name=$SLURM_JOB_NAME" "cluster.address=$address")
[ -z "${COPIES:-}" ] || options+=(cluster.own_disks=true queue.standby=true "checkpoint.remote=file://$COPIES")
start=(run "$1" --runs "$runs")
copies=("${COPIES:-}/$SLURM_JOB_NAME"-????????)
if [ -n "${COPIES:-}" ] && [ -d "${copies[0]}" ]; then
    start=(resume "$run" --from "file://${copies[0]}")
elif [ -d "$run" ]; then
    start+=(--resume)
fi
# It waits until there is room for all of it, so for all nodes that it needs.
streamppo "${start[@]}" "${options[@]}" "${@:2}" &
training=$!
trap 'kill -TERM "$training"' TERM
# A signal ends the first wait; the second one is for the checkpoint.
wait "$training" || wait "$training"
