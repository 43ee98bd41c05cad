#!/bin/bash
# Several machines under Slurm, one launcher per machine:
#   sbatch recipes/accelerate/slurm.sh --config recipes/math_zero3.yaml --baseline otb
# Everything after the script goes to recipes/math.py. Not run on a cluster here; the command was tried with two
# launchers on one machine, see recipes/README.md.
#SBATCH --job-name=trl-otb
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --signal=TERM@300

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
export FIRST_MACHINE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export GPUS=$((SLURM_NNODES * 8))

# SLURM_NODEID differs from machine to machine, so it is read there and not here.
srun bash -c 'exec accelerate launch --config_file recipes/accelerate/zero3.yaml \
    --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" --num_processes "$GPUS" \
    --main_process_ip "$FIRST_MACHINE" --main_process_port 29500 recipes/math.py "$@"' slurm.sh "$@"
