#!/usr/bin/env bash
# Installs what a SLURM on one machine needs (Debian or Ubuntu, as root). Starts nothing.
set -euo pipefail
for program in slurmctld slurmd slurmdbd sbatch munged mariadbd; do
  command -v "$program" >/dev/null || missing=1
done
[ -n "${missing:-}" ] || exit 0
export DEBIAN_FRONTEND=noninteractive
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d.lowprec
chmod +x /usr/sbin/policy-rc.d.lowprec
[ -e /usr/sbin/policy-rc.d ] || ln -s policy-rc.d.lowprec /usr/sbin/policy-rc.d # start no service
trap '[ "$(readlink /usr/sbin/policy-rc.d)" != policy-rc.d.lowprec ] || rm /usr/sbin/policy-rc.d
rm -f /usr/sbin/policy-rc.d.lowprec' EXIT
apt-get update -q
apt-get install -yq --no-install-recommends slurm-wlm slurmdbd munge mariadb-server
