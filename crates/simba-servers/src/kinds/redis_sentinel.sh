# Arguments: the ports of master, replica, three sentinels.
set -eu
trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT
master=$1
node=0
for port in "$@"; do
    cd "$node"
    if [ "$node" -lt 2 ]; then
        replica=
        [ "$node" -eq 0 ] || replica="--replicaof 127.0.0.1 $master"
        [ -e redis.conf ] || printf 'save ""\nappendonly no\n' >redis.conf
        redis-server redis.conf --bind 127.0.0.1 --port "$port" --dir . --logfile log --pidfile pid \
            --repl-diskless-sync-delay 0 --repl-ping-replica-period 1 $replica &
    else
        if [ ! -e sentinel.conf ]; then
            {
                echo "sentinel monitor mymaster 127.0.0.1 $master 2"
                echo "sentinel down-after-milliseconds mymaster ${DOWN_AFTER:-5000}"
                echo "sentinel failover-timeout mymaster ${FAILOVER_TIMEOUT:-3000}"
            } >sentinel.conf
        fi
        redis-server sentinel.conf --sentinel --bind 127.0.0.1 --port "$port" --dir . --logfile log --pidfile pid &
    fi
    echo $! >pid.shell
    cd ..
    # A sentinel that starts before the master has its replica polls again only after ten seconds.
    [ "$node" -ne 1 ] || until redis-cli -p "$master" info replication 2>/dev/null | grep -q 'state=online'; do
        sleep 0.05
    done
    node=$((node + 1))
done
# A sentinel does not promote a replica that has not answered it.
shift 2
for port in "$@"; do
    until redis-cli -p "$port" sentinel master mymaster 2>/dev/null | tr '\n' ' ' |
        grep -q 'num-slaves 1 num-other-sentinels 2 ' &&
        redis-cli -p "$port" sentinel replicas mymaster | tr '\n' ' ' | grep -q 'master-link-status ok '; do
        sleep 0.05
    done
done
touch ready
# The end of one node does not end the others.
while :; do wait || true; sleep 1; done
