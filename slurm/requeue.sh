# source requeue.sh [FOLDER OF SUBMITIT]: a line of a job's batch script, before training starts
# (sweeps, Hydra's launcher, *.sbatch).
#
# Training that is asked to stop (SIGUSR2 or SIGTERM: preemption, time limit) saves and exits 75.
# When the script ends with that status the job goes back into the queue: five tries, as the
# controller may be restarting. If all fail the script's status stays 75 and the checkpoint is kept;
# the same command, or `sweep submit`, goes on from it. A job that was cancelled stays so.

# srun of SLURM 22.05 and later no longer reads the first: ranks and workers would share one core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# Ranks that have saved leave one after the other: the first exit must end no other, whatever the
# cluster's default. Those that wait for one that never came are ended a minute after it.
export SLURM_KILL_BAD_EXIT=0 SLURM_WAIT=60

trap ':' TERM USR2 # the script outlives the signal that its training answers

# Not $SLURM_JOB_ID: for one task of an array that is the array's id, and all tasks would run again.
_job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"
_job="${_job:-${SLURM_JOB_ID:-}}"

_requeue_if_stopped() {
  local status=$? try state
  trap - EXIT
  # 140: SIGUSR2 came before training could catch it, and nothing is lost. Three times at most: with
  # a time limit shorter than its warning every start would end so.
  if [ "$status" -eq 140 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then status=75; fi
  if [ "$status" -eq 75 ] && [ -n "$_job" ]; then
    # A job that is warned or preempted is RUNNING; at its limit it is COMPLETING for that reason.
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

# A kill while submitit writes a file leaves *.save_tmp, at which its next attempt would fail.
if [ -d "${1:-}" ] && [ -n "$_job" ]; then
  find "$1" -name "${_job}_*.save_tmp" -delete \
    -printf 'requeue.sh: warning: %p, left by a kill, is removed\n' >&2
fi
