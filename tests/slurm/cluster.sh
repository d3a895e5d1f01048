#!/usr/bin/env bash
# A real Slurm with accounting and two nodes, n1 and n2, on this one machine: a CPU and two make-believe GPUs each.
# For tests on Debian 12; runs as root and needs no systemd.
#
#   cluster.sh up       install what is missing, start what is not running, wait until jobs can run
#   cluster.sh down     stop the daemons that `up` started; running jobs are left alone
#   cluster.sh status   list daemons and nodes; exit 0 only when everything is up
set -euo pipefail
umask 022

ETC=/etc/slurm
LOG=/var/log/slurm
STATE=/var/lib/slurm
RUN=/run/slurm
DB_SOCKET=$RUN/mariadb.sock
MARK='# Written by tests/slurm/cluster.sh; edits are overwritten.'
DAEMONS=(munged mariadbd slurmdbd slurmctld slurmd-n1 slurmd-n2)  # in starting order

export LC_ALL=C PATH=/usr/sbin:/sbin:/usr/bin:/bin:$PATH
unset "${!SLURM_@}" "${!SINFO_@}"  # may have been set by a surrounding job

die() { echo "cluster.sh: $*" >&2; exit 1; }

fail() {  # DAEMON REASON
  { echo "cluster.sh: $1: $2; last lines of $LOG/$1.log:"; tail -n 20 "$LOG/$1.log"; } >&2
  exit 1
}

live_pid() {  # DAEMON: print its pid if the daemon from our pid file is running
  local pid
  pid=$(cat "$RUN/$1.pid") && [[ -n $pid ]] || return 1
  # The command line tells apart a reused pid and, being empty, a zombie.
  [[ $(tr '\0' ' ' <"/proc/$pid/cmdline") == *"${1/-/ -N }"* ]] && echo "$pid"
} 2>/dev/null

alive() { live_pid "$1" >/dev/null; }

detach() {  # DAEMON COMMAND...: become COMMAND; call only in a subshell
  local log=$LOG/$1.log fd
  shift
  # Keep no descriptor of the caller's: a pipe held open would hang `make slurm | cat`.
  for fd in /proc/"$BASHPID"/fd/*; do
    fd=${fd##*/}
    ((fd < 3 || fd == 255)) || eval "exec $fd>&-"
  done
  cd /
  exec setsid "$@" </dev/null >>"$log" 2>&1
}

launch() {  # DAEMON COMMAND...: for a command that stays in the foreground
  detach "$@" &
  echo $! >"$RUN/$1.pid"
}

wait_for() {  # DAEMON COMMAND...: poll until COMMAND succeeds
  local name=$1 end=$((SECONDS + 60)) out
  shift
  until out=$("$@" 2>&1); do
    ((SECONDS < end)) || fail "$name" "not ready after 60 s${out:+ ($out)}"
    sleep 0.1
  done
}

stop() {  # DAEMON
  local pid i
  if pid=$(live_pid "$1"); then
    kill "$pid" || true  # it may end by itself meanwhile
    for ((i = 0; i < 300; i++)); do
      alive "$1" || break
      sleep 0.1
    done
    alive "$1" && kill -9 "$pid" || true
  fi
  rm -f "$RUN/$1.pid"
}

install_packages() {
  local want=(slurmctld slurmd slurmdbd slurm-client slurm-wlm-basic-plugins slurm-wlm-mysql-plugin
              munge mariadb-server-core mariadb-client-core) policy=/usr/sbin/policy-rc.d
  [[ $(dpkg-query -W -f '${db:Status-Status}\n' "${want[@]}" 2>/dev/null |
       grep -cx installed) == "${#want[@]}" ]] && return
  command -v apt-get >/dev/null || die "apt-get not found; this needs Debian"
  # Packages start their own services where they can; ours are started below.
  if [[ ! -e $policy ]]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  echo "Installing Slurm, MUNGE and MariaDB"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
    -o DPkg::Lock::Timeout=300 "${want[@]}" </dev/null >/dev/null
}

refuse_foreign_config() {
  local file
  for file in "$ETC"/slurm.conf "$ETC"/slurmdbd.conf "$ETC"/gres.conf; do
    [[ ! -e $file || $(head -n 1 "$file") == "$MARK" ]] ||
      die "$file was not written by this script; move it away first"
  done
}

put() {  # FILE MODE: write stdin to FILE; remember in `changed` that it differs
  cat >"$1.new"
  cmp -s "$1.new" "$1" || changed=1
  chown slurm:slurm "$1.new"
  chmod "$2" "$1.new"
  mv "$1.new" "$1"
}

configure() {
  local host bind='' name changed=''
  host=$(uname -n)
  # These bind every socket to the host name's address, so only a loopback one will do.
  if [[ $(getent ahostsv4 "$host") == 127.* ]]; then
    bind=CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
  fi
  host=${host%%.*}
  getent passwd slurm >/dev/null || useradd --system --user-group --no-create-home slurm
  install -d "$ETC"
  install -d -o slurm -g slurm "$LOG" "$STATE" "$STATE/slurmctld" "$STATE/slurmd" "$RUN"

  put "$ETC/slurmdbd.conf" 600 <<CONF
$MARK
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=6819
SlurmUser=slurm
AuthType=auth/munge
${bind%,*}
# The socket is named by MYSQL_UNIX_PORT, and its peer is the password.
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
LogFile=$LOG/slurmdbd.log
PidFile=$RUN/slurmdbd.pid
CONF

  put "$ETC/slurm.conf" 644 <<CONF
$MARK
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=6817
SlurmUser=slurm
AuthType=auth/munge
# A requeued job waits this long before it may start again; the default is 120 s.
AuthInfo=cred_expire=5
$bind

SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd-%n.pid
SlurmctldLogFile=$LOG/slurmctld.log
SlurmdLogFile=$LOG/slurmd-%n.log
StateSaveLocation=$STATE/slurmctld
SlurmdSpoolDir=$STATE/slurmd/%n

# Nothing here needs cgroups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=6819

SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,bf_continue
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MaxArraySize=20001
MaxJobCount=100000
MinJobAge=3600
JobRequeue=1
KillWait=2
# An srun that was killed would otherwise keep its allocation for ever.
InactiveLimit=60
MessageTimeout=20
SlurmdTimeout=20
ReturnToService=2

# The sizes below count, whatever the machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=6821 CPUs=1 RealMemory=8000 Gres=gpu:2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=6822 CPUs=1 RealMemory=8000 Gres=gpu:2
PartitionName=debug Default=YES Nodes=n1,n2 MaxTime=INFINITE State=UP
CONF

  # Any device will do for Slurm to hand out GPUs by number.
  ln -sfn /dev/null "$STATE/gpu0"
  ln -sfn /dev/null "$STATE/gpu1"
  put "$ETC/gres.conf" 644 <<CONF
$MARK
AutoDetect=off
NodeName=n1,n2 Name=gpu File=$STATE/gpu[0-1]
CONF

  if [[ $changed ]]; then
    for name in slurmd-n2 slurmd-n1 slurmctld slurmdbd; do stop "$name"; done
  fi
}

munge_works() { munge -n </dev/null | unmunge; }

start_munged() {
  munge_works &>/dev/null && return  # another munged does as well
  [[ -s /etc/munge/munge.key ]] || setpriv --reuid=munge --regid=munge --clear-groups mungekey -c
  install -d -o munge -g munge /run/munge
  launch munged setpriv --reuid=munge --regid=munge --clear-groups munged --foreground
  wait_for munged munge_works
}

sql() { mariadb --no-defaults --socket="$DB_SOCKET" --user=root -e "$1"; }

start_mariadbd() {
  alive mariadbd && return
  local data=$STATE/mariadb
  if [[ ! -d $data ]]; then
    rm -rf "$data.new"
    mariadb-install-db --no-defaults --user=slurm --datadir="$data.new" --skip-name-resolve --force \
      --skip-test-db --auth-root-authentication-method=socket >>"$LOG/mariadbd.log" 2>&1 ||
      fail mariadbd "mariadb-install-db failed"
    mv "$data.new" "$data"
  fi
  launch mariadbd mariadbd --no-defaults --user=slurm --datadir="$data" \
    --socket="$DB_SOCKET" --pid-file="$data/mariadbd.pid" --skip-networking \
    --innodb-buffer-pool-size=64M --innodb-log-file-size=32M --innodb-lock-wait-timeout=900 \
    --innodb-flush-log-at-trx-commit=2 --innodb-use-native-aio=OFF
  wait_for mariadbd sql "CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED VIA unix_socket;
                         GRANT ALL ON slurm_acct_db.* TO slurm@localhost;"
}

acct() { timeout 10 sacctmgr --noheader --parsable2 --immediate "$@"; }

start_slurmdbd() {
  if ! alive slurmdbd; then
    (MYSQL_UNIX_PORT=$DB_SOCKET detach slurmdbd slurmdbd) || fail slurmdbd "cannot start"
    wait_for slurmdbd acct show cluster
  fi
  [[ $(acct show cluster format=cluster) == *tests* ]] || acct add cluster tests >/dev/null
  [[ $(acct show qos format=name) == *high* ]] || acct add qos high >/dev/null
  [[ $(acct show account format=account) == *research* ]] ||
    acct add account research cluster=tests qos=normal,high >/dev/null
  [[ $(acct show assoc user=root format=account) == *research* ]] ||
    acct add user root account=research qos=normal,high >/dev/null
}

ctld_up() { timeout 10 scontrol ping | grep -q 'is UP'; }

start_slurmctld() {
  alive slurmctld && return
  (detach slurmctld slurmctld) || fail slurmctld "cannot start"
  wait_for slurmctld ctld_up
}

port_open() { : <>"/dev/tcp/127.0.0.1/$1"; }

start_slurmd() {  # NODE PORT
  alive "slurmd-$1" && return
  (detach "slurmd-$1" slurmd -N "$1") || fail "slurmd-$1" "cannot start"
  wait_for "slurmd-$1" port_open "$2"
}

nodes_up() {
  [[ $(timeout 10 sinfo -h -N -o '%N %t' | grep -cxE 'n[12] (idle|mix|alloc|comp|plnd)') == 2 ]]
}

lock() {  # one run at a time
  ((EUID == 0)) || die "must run as root"
  mkdir -p "$RUN"
  exec {lock_fd}>"$RUN/lock"
  flock -w 600 "$lock_fd" || die "another run holds $RUN/lock"
}

up() {
  local node state
  lock
  refuse_foreign_config
  install_packages
  configure
  start_munged
  start_mariadbd
  start_slurmdbd
  start_slurmctld
  start_slurmd n1 6821
  start_slurmd n2 6822
  # A node that an earlier failure left drained or down does not come back by itself.
  while read -r node state; do
    [[ $state =~ ^(drain|drng|down|fail) ]] && scontrol update nodename="$node" state=resume || true
  done < <(timeout 10 sinfo -h -N -o '%N %t')
  wait_for slurmctld nodes_up

  sinfo
  echo "Slurm is ready: nodes n1 and n2, partition debug."
}

down() {
  local i
  lock
  for ((i = ${#DAEMONS[@]} - 1; i >= 0; i--)); do stop "${DAEMONS[i]}"; done
}

status() {
  local name pid rc=0
  for name in "${DAEMONS[@]}"; do
    if pid=$(live_pid "$name"); then
      echo "$name: running, pid $pid"
    elif [[ $name == munged ]] && munge_works &>/dev/null; then
      echo "$name: running, not started here"
    else
      echo "$name: not running"
      rc=1
    fi
  done
  ((rc == 0)) && sinfo && nodes_up
}

case ${1-} in
  up | down | status) "$1" ;;
  *) die "usage: cluster.sh up|down|status" ;;
esac
