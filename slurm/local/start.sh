#!/usr/bin/env bash
# start.sh DIR: starts a SLURM on this machine, with accounting, all below DIR; as root, no systemd.
#
# One node of two cores in the partition `low`, and two nodes of one core, with host names of their
# own, in `nodes`; jobs of both are preempted by those of `high` (signaled, then requeued).
# To use it, export SLURM_CONF=DIR/slurm.conf; stop.sh DIR ends it.
set -euo pipefail
mkdir -p "$1"
dir=$(cd "$1" && pwd)
host=$(hostname -s)
memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.8)}' /proc/meminfo)
export SLURM_CONF=$dir/slurm.conf MYSQL_UNIX_PORT=$dir/run/mariadb.sock
mkdir -p "$dir"/{state,spool/{"$host",node1,node2},log,run,munge}
chmod 755 "$dir" "$dir/run"

cat >"$SLURM_CONF" <<CONF
ClusterName=lowprec
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
AuthType=auth/munge
# Credentials expire soon; otherwise a requeued job waits two minutes
AuthInfo=cred_expire=5,socket=$dir/run/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=16819
AccountingStoragePass=$dir/run/munge.sock
SchedulerParameters=bf_interval=5,sched_interval=5,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
# As on some clusters, where the first rank that exits ends the others
KillOnBadExit=1
JobRequeue=1
NodeName=$host NodeAddr=127.0.0.1 Port=16818 CPUs=2 RealMemory=$memory State=UNKNOWN
NodeName=node1 NodeAddr=127.0.0.1 Port=16821 CPUs=1 RealMemory=$memory State=UNKNOWN
NodeName=node2 NodeAddr=127.0.0.1 Port=16822 CPUs=1 RealMemory=$memory State=UNKNOWN
PartitionName=low Nodes=$host Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=nodes Nodes=node1,node2 MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
CONF
cat >"$dir/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=16819
SlurmUser=root
PidFile=$dir/run/slurmdbd.pid
LogFile=$dir/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
CONF
chmod 600 "$dir/slurmdbd.conf"

until_ready() { # until_ready WHAT COMMAND...: waits up to 30 s
  local what=$1 deadline=$((SECONDS + 30))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || { echo "start.sh: $what does not come up: $dir/log" >&2; exit 1; }
    sleep 0.2
  done
}

[ -e "$dir/munge/key" ] || mungekey --create --keyfile="$dir/munge/key"
munged --force --key-file="$dir/munge/key" --socket="$dir/run/munge.sock" \
  --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed"

if [ ! -e "$dir/mariadb" ]; then
  mariadb-install-db --no-defaults --user=root --datadir="$dir/mariadb" \
    --auth-root-authentication-method=socket --skip-test-db >"$dir/log/mariadb-install.log" 2>&1
fi
setsid mariadbd --no-defaults --user=root --datadir="$dir/mariadb" --skip-networking \
  --socket="$MYSQL_UNIX_PORT" --pid-file="$dir/run/mariadbd.pid" \
  --innodb-buffer-pool-size=64M >"$dir/log/mariadbd.log" 2>&1 </dev/null &
until_ready mariadbd mariadb-admin --no-defaults --socket="$MYSQL_UNIX_PORT" ping

slurmdbd
until_ready slurmdbd sacctmgr -n show cluster
sacctmgr -n show cluster | grep -q lowprec || sacctmgr -i add cluster lowprec >/dev/null
slurmctld -f "$SLURM_CONF"
slurmd -f "$SLURM_CONF" -N "$host"
{ cat /etc/hosts && echo "127.0.0.1 node1 node2"; } >"$dir/hosts"
for node in node1 node2; do "$(dirname "$0")/node.sh" "$dir" "$node"; done
until_ready slurmctld scontrol ping
until_ready slurmd sh -c 'sinfo -h -N -p high -o %t | grep -c -E "idle|mix|alloc" | grep -q 3'
echo "SLURM is up: export SLURM_CONF=$SLURM_CONF"
