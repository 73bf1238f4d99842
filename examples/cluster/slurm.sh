#!/bin/bash
# Run a study on a Slurm cluster: a Ray node on every machine of the job, the driver on the first.
#
#     sbatch examples/cluster/slurm.sh study.toml /shared/out
#
# The output folder should be on storage shared by all machines, so that a run whose machine fails
# resumes from its checkpoint. The job can be stopped or requeued at any time: finished runs are not
# trained again.
#SBATCH --job-name=foveate
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

study=${1:?usage: slurm.sh STUDY OUT}
out=${2:?usage: slurm.sh STUDY OUT}
# source /shared/venv/bin/activate      # the same version of foveate[ray] on all machines

export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token # other users of the machines cannot submit work to this cluster
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(python -c 'import secrets; print(secrets.token_hex(32))')}
cpus=${SLURM_CPUS_PER_TASK:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a machine have different ports
host=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address)
host=${host%% *}
address=$host:$port
trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT

# --overlap: driver, head and workers share one allocation. --block: ray start runs until killed.
ray=(ray start --num-cpus="$cpus" --num-gpus="$gpus" --block)
srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    "${ray[@]}" --head --port="$port" --include-dashboard=false &
timeout 120 bash -c "until : 2> /dev/null < /dev/tcp/$host/$port; do sleep 1; done"
if ((${#nodes[@]} > 1)); then
    srun --overlap --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) \
        --exclude="${nodes[0]}" "${ray[@]}" --address="$address" &
fi

# Runs start on the machines that are ready and use the others as soon as they join.
foveate sweep "$study" --engine ray --address "$address" --out "$out"
