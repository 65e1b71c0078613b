#!/usr/bin/env bash
# A real SLURM of N virtual nodes with G generic GPUs each on this one machine (Debian or Ubuntu, root).
#
#   eval "$(tests/slurm/cluster.sh up 4 8)"   installs SLURM if it is missing, starts it, prints the variables to export
#   tests/slurm/cluster.sh down               stops it, and nothing else
#
# SLURM_TEST_DIR   configuration, sockets, logs (default: /tmp/moe-slurm). Clusters in different directories run side by side:
#                  each has its own ports, node names and munge daemon.
set -euo pipefail

dir=${SLURM_TEST_DIR:-/tmp/moe-slurm}
slots=/tmp/.moe-slurm-slots # one directory per cluster of this machine: its ports and node names
export DEBIAN_FRONTEND=noninteractive PATH="$PATH:/usr/sbin:/sbin"

say() { echo "cluster.sh: $*" >&2; }
die() { say "$*"; exit 1; }

install_slurm() {
    local missing=() tool
    for tool in slurmctld slurmd sbatch:slurm-client munged:munge; do
        command -v "${tool%%:*}" >/dev/null || missing+=("${tool##*:}")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    local command=(apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 "${missing[@]}")
    "${command[@]}" >/dev/null 2>"$dir/log/apt.log" ||
        { apt-get update -qq && "${command[@]}"; } >/dev/null 2>"$dir/log/apt.log" ||
        die "apt-get could not install ${missing[*]}: $(tail -3 "$dir/log/apt.log")"
}

take_slot() {
    local number
    mkdir -p "$slots"
    for number in $(seq 0 79); do
        if mkdir "$slots/$number" 2>/dev/null; then
            echo $$ >"$slots/$number/taker"
            echo "$dir" >"$slots/$number/dir"
            echo "$number" >"$dir/slot"
            return
        fi
        # Left behind by a cluster that was never taken down, say because its directory was removed.
        local owner
        owner=$(cat "$slots/$number/dir" 2>/dev/null || true)
        if [ -n "$owner" ] && ! is_running "$owner/run/slurmctld.pid" && ! is_running "$slots/$number/taker"; then
            rm -rf "${slots:?}/$number"
        fi
    done
    die "no free slot in $slots"
}

is_running() { [ -s "$1" ] && [ -d "/proc/$(cat "$1")" ] && ! grep -q '^State:.Z' "/proc/$(cat "$1")/status"; }

configure() {
    local nodes=$1 gpus=$2 slot port last prefix
    slot=$(cat "$dir/slot") port=$((17000 + 100 * slot)) last=$((nodes - 1)) prefix="moe${slot}n"
    [ "$nodes" -le 90 ] || die "at most 90 nodes"
    cat >"$dir/etc/slurm.conf" <<CONF
ClusterName=moe$slot
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
# From the clock, so that no job of an earlier cluster had the same id.
FirstJobId=$(($(date +%s) % 60000000 + 1))
# SLURM's own default: what ends sooner does so because the project ends it.
KillWait=30
MinJobAge=3600
# A job starts at once, and a requeued one after cred_expire instead of after two minutes.
SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,sched_interval=1,bf_interval=1
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=60
SlurmdTimeout=300
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=$prefix[0-$last] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[$((port + 10))-$((port + 10 + last))] CPUs=256 RealMemory=2000000 Gres=gpu:$gpus State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=gpu Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
CONF
    for gpu in $(seq 0 $((gpus - 1))); do
        [ -c "$dir/dev/gpu$gpu" ] || mknod "$dir/dev/gpu$gpu" c 1 3 # /dev/null: counted and allocated, never used
    done
    echo "NodeName=$prefix[0-$last] Name=gpu File=$dir/dev/gpu[0-$((gpus - 1))]" >"$dir/etc/gres.conf"
    for node in $(seq 0 "$last"); do echo "$prefix$node"; done >"$dir/nodes"
}

# The nodes' names lead to this machine. Another cluster may be editing the same file.
name_nodes() {
    {
        flock 9
        sed "/# $(tag)\$/d" /etc/hosts >"$dir/hosts"
        if [ "$1" = up ]; then echo "127.0.0.1 $(paste -sd' ' "$dir/nodes") # $(tag)" >>"$dir/hosts"; fi
        cat "$dir/hosts" >/etc/hosts # not by rename: in a container it is a mount
    } 9>>"$slots/.hosts-lock"
}

tag() { echo "moe-slurm slot $(cat "$dir/slot")"; }

start() {
    local munge=$dir/run/munge.socket node
    [ -s "$dir/munge.key" ] || dd if=/dev/urandom of="$dir/munge.key" bs=1024 count=1 status=none
    chmod 400 "$dir/munge.key"
    munged --force --key-file="$dir/munge.key" --socket="$munge" --pid-file="$dir/run/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed" || die "munged: $(tail -3 "$dir/log/munged.log")"
    export SLURM_CONF=$dir/etc/slurm.conf
    slurmctld -f "$SLURM_CONF" >/dev/null || die "slurmctld: $(tail -5 "$dir/log/slurmctld.log")"
    while read -r node; do
        mkdir -p "$dir/spool/$node"
        # A host name of its own for each node; the network stays shared.
        unshare --uts bash -c 'hostname "$1" && exec slurmd -f "$SLURM_CONF" -N "$1"' start "$node" >/dev/null ||
            die "slurmd $node: $(tail -5 "$dir/log/slurmd.$node.log")"
    done <"$dir/nodes"
    for _ in $(seq 300); do
        [ "$(sinfo --noheader --Node --states=idle --partition=gpu --format=%N 2>/dev/null | wc -l)" = \
            "$(wc -l <"$dir/nodes")" ] && return
        sleep 0.1
    done
    die "the nodes do not come up: $(sinfo --Node 2>&1; tail -5 "$dir/log/slurmctld.log")"
}

up() {
    local nodes=${1:?nodes} gpus=${2:?GPUs a node}
    [ "$(id -u)" = 0 ] || die "has to run as root: nodes get host names and device files of their own"
    if is_running "$dir/run/slurmctld.pid"; then
        [ "$(wc -l <"$dir/nodes")" = "$nodes" ] || die "$dir runs with $(wc -l <"$dir/nodes") nodes: down first"
    else
        mkdir -p "$dir"/{etc,state,spool,run,log,dev}
        chmod 755 "$dir" "$dir/run"
        install_slurm
        [ -s "$dir/slot" ] || take_slot
        configure "$nodes" "$gpus"
        name_nodes up
        start
    fi
    echo "export SLURM_CONF=$dir/etc/slurm.conf"
}

# Processes of this cluster only. `daemons`: their files lie in its directory; `steps`: what is left of its jobs when a
# daemon was killed (a slurmstepd works in the directory, a task has its configuration).
ours() {
    local process pid environment
    for process in /proc/[0-9]*; do
        pid=${process#/proc/}
        if tr '\0' ' ' 2>/dev/null <"$process/cmdline" | grep -qE "^[^ ]*(slurmctld|slurmd|munged) .*$dir/"; then
            [ "$1" = daemons ] && echo "$pid"
        elif [ "$1" = steps ]; then
            environment=$(tr '\0' '\n' 2>/dev/null <"$process/environ" || true)
            if [[ $(readlink "$process/exe" || true) = */slurmstepd* && $(readlink "$process/cwd") = "$dir"/* ]] ||
                [[ $'\n'$environment$'\n' = *$'\n'"SLURM_CONF=$dir/etc/slurm.conf"$'\n'* &&
                    $'\n'$environment = *$'\n'SLURM_JOB_ID=* ]]; then
                echo "$pid"
            fi
        fi
    done
    return 0
}

stop_all() { # signal, seconds, pids
    local signal=$1 seconds=$2 pid alive=()
    shift 2
    kill "-$signal" "$@" 2>/dev/null || true
    for _ in $(seq $((seconds * 10))); do
        alive=()
        for pid in "$@"; do
            [ -d "/proc/$pid" ] && ! grep -q '^State:.Z' "/proc/$pid/status" 2>/dev/null && alive+=("$pid")
        done
        [ ${#alive[@]} -gt 0 ] || return 0
        sleep 0.1
    done
    return 1
}

down() {
    [ -d "$dir/etc" ] || { say "no cluster in $dir"; return 0; }
    export SLURM_CONF=$dir/etc/slurm.conf
    local jobs pids
    if is_running "$dir/run/slurmctld.pid" && jobs=$(squeue --noheader --format=%A 2>/dev/null) && [ -n "$jobs" ]; then
        echo "$jobs" | sort -u | xargs scancel --signal=KILL --full 2>/dev/null || true
        echo "$jobs" | sort -u | xargs scancel 2>/dev/null || true
        for _ in $(seq 100); do
            [ -n "$(squeue --noheader --states=running,completing 2>/dev/null)" ] || break
            sleep 0.1
        done
    fi
    pids=$(ours steps)
    # shellcheck disable=SC2086
    [ -z "$pids" ] || stop_all KILL 5 $pids || die "still running: $pids"
    pids=$(ours daemons)
    # shellcheck disable=SC2086
    [ -z "$pids" ] || stop_all TERM 10 $pids || stop_all KILL 5 $pids || die "still running: $pids"
    if [ -s "$dir/slot" ]; then
        name_nodes down
        rm -rf "${slots:?}/$(cat "$dir/slot")"
    fi
    rm -rf "${dir:?}"/{etc,state,spool,run,dev,slot,nodes,munge.key,munge.seed,hosts}
}

case ${1:-} in
    up) up "${2:-4}" "${3:-8}" ;;
    down) down ;;
    *) die "usage: cluster.sh up NODES GPUS | down" ;;
esac
