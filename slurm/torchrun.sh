# source torchrun.sh KEYS: a torchrun a node, a process a GPU; sourced after requeue.sh.
#
# The signal that asks to stop comes to this script (--signal=B:USR2). It passes it on to the training
# processes; torchrun itself ignores it, as it would otherwise kill them before they have saved.

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
asked=
trap 'asked=1' USR2 TERM

srun bash -c 'trap "" USR2
  exec torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$0:29500" \
    -m experiments.train "$@"' "$head" "$@" &
training=$!

told=
while kill -0 "$training" 2>/dev/null; do
  if [ -n "$asked" ] && [ -z "$told" ]; then
    scancel --signal=USR2 "$SLURM_JOB_ID" && told=1 # its steps; a failure is tried again
  fi
  sleep 2 &
  wait $!
done
wait "$training"
status=$?
# torchrun exits 1 whatever its processes did; after a stop the job goes on from its checkpoint
if [ -n "$asked" ] && [ "$status" -ne 0 ]; then exit 75; fi
exit "$status"
