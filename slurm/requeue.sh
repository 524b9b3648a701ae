# source requeue.sh [FOLDER OF SUBMITIT]: in a job's batch script, before training starts (used by
# sweeps, Hydra's launcher and *.sbatch).
#
# Training that is asked to stop (SIGUSR2 or SIGTERM, at preemption or a time limit) saves and exits
# with 75. A script that ends with this status requeues its job. It tries five times, because the
# controller may be restarting; if all tries fail, the status stays 75, the checkpoint is kept, and
# the same command or `sweep submit` continues from it. A cancelled job stays cancelled.

# Since SLURM 22.05 srun ignores SLURM_CPUS_PER_TASK: ranks and workers would share one core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# Ranks exit one after the other once they have saved: the first exit must not end the others,
# whatever the cluster's default. SLURM ends ranks that still wait a minute after the first exit.
export SLURM_KILL_BAD_EXIT=0 SLURM_WAIT=60

trap ':' TERM USR2 # the script outlives the signals that training handles

# Not $SLURM_JOB_ID alone: in an array it can be the array's id, which would requeue all its tasks.
_job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"
_job="${_job:-${SLURM_JOB_ID:-}}"

_requeue_if_stopped() {
  local status=$? try state
  trap - EXIT
  # 140: SIGUSR2 came before training could catch it; nothing is lost. At most three times, because
  # with a time limit shorter than its warning every start would end like this.
  if [ "$status" -eq 140 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then status=75; fi
  if [ "$status" -eq 75 ] && [ -n "$_job" ]; then
    # A warned or preempted job is RUNNING; at its time limit it is COMPLETING with a reason.
    state=$(timeout "${REQUEUE_TIMEOUT_S:-60}" squeue -h -j "$_job" -o '%T %r')
    if [ "$state" = "COMPLETING None" ]; then
      echo "requeue.sh: job $_job was cancelled; its checkpoint is kept" >&2
      exit 75
    fi
    for try in 1 2 3 4 5; do
      if timeout "${REQUEUE_TIMEOUT_S:-60}" scontrol requeue "$_job"; then
        echo "requeue.sh: job $_job is in the queue again" >&2
        exit 75
      fi
      echo "requeue.sh: scontrol requeue failed (try $try of 5)" >&2
      [ "$try" -eq 5 ] || sleep "$((${REQUEUE_WAIT_S:-1} * 2 ** (try - 1)))"
    done
    echo "requeue.sh: job $_job is not requeued; its checkpoint is kept" >&2
  fi
  exit "$status"
}
trap _requeue_if_stopped EXIT

# If submitit is killed while it writes a file, it leaves *.save_tmp, which fails its next attempt.
if [ -d "${1:-}" ] && [ -n "$_job" ]; then
  find "$1" -name "${_job}_*.save_tmp" -delete \
    -printf 'requeue.sh: warning: removed %p, left by a kill\n' >&2
fi
