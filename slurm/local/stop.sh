#!/usr/bin/env bash
# stop.sh DIR: ends the daemons of start.sh DIR by their pids; jobs are killed, files stay.
set -u
dir=$(cd "$1" && pwd) || exit 1
export SLURM_CONF=$dir/slurm.conf
timeout 20 scancel --quiet --full --signal=KILL --user=root 2>/dev/null
for _ in $(seq 50); do # 10 s: the daemons of steps end only if the controller answers
  [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break
  sleep 0.2
done
for file in "$dir"/run/{slurmctld,slurmd-*,slurmdbd,mariadbd,munged}.pid; do
  pid=$(cat "$file" 2>/dev/null) || continue
  kill "$pid" 2>/dev/null
  for _ in $(seq 100); do # 10 s
    grep -q '^State:.[^Z]' "/proc/$pid/status" 2>/dev/null || break # a zombie has ended
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null
  rm -f "$file"
done
exit 0
