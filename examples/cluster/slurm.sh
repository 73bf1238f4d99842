#!/bin/bash
# A study on a Slurm cluster: a Ray node on every machine of the job, the driver on the first.
#
#     sbatch examples/cluster/slurm.sh study.toml /shared/out
#
# OUT should be on storage that all machines see: then a run whose machine fails goes on from its
# checkpoint. The job may be stopped or requeued at any time: what is done is not done again.
#SBATCH --job-name=foveate
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

study=${1:?say which study}
out=${2:?say where results go}
# source /shared/venv/bin/activate      # the same foveate[ray] on all machines

export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token # other users of the machines cannot use this cluster
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(python -c 'import secrets; print(secrets.token_hex(32))')}
cpus=${SLURM_CPUS_PER_TASK:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a machine have different ones
host=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address)
host=${host%% *}
address=$host:$port
trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT

# --overlap: the driver, the head and the others use the same allocation. --block: until it ends.
ray=(ray start --num-cpus="$cpus" --num-gpus="$gpus" --block)
srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    "${ray[@]}" --head --port="$port" --include-dashboard=false &
timeout 120 bash -c "until : 2> /dev/null < /dev/tcp/$host/$port; do sleep 1; done"
if ((${#nodes[@]} > 1)); then
    srun --overlap --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) \
        --exclude="${nodes[0]}" "${ray[@]}" --address="$address" &
fi

# Runs start on the machines that are there and spread to those that come later.
foveate sweep "$study" --engine ray --address "$address" --out "$out"
