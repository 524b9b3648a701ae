#!/usr/bin/env bash
# node.sh DIR NODE: starts the slurmd of NODE under its own host name, which /etc/hosts has for it
# and its jobs alone; called by start.sh, and again for a node that has been lost.
set -euo pipefail
unshare --mount --uts sh -c \
  'hostname "$2" && mount --bind "$1/hosts" /etc/hosts && exec slurmd -f "$1/slurm.conf"' -- "$@"
