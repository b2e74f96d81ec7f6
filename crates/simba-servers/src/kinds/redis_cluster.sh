# Arguments: the ports of six nodes. With a file `tls-ports`, each node has a TLS port, too, in its line; the nodes use
# it among each other, because otherwise they would redirect a TLS client to the plain ports.
set -eu
trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT
node=0
hosts=
for port in "$@"; do
    cd "$node"
    tls=
    member=$port
    if [ -e ../tls-ports ]; then
        member=$(sed -n "$((node + 1))p" ../tls-ports)
        tls="--tls-port $member --tls-auth-clients optional --tls-cluster yes --tls-replication yes"
        tls="$tls --tls-ca-cert-file ../ca.pem --tls-cert-file ../server.pem --tls-key-file ../server.key"
        tls="$tls --tls-client-cert-file ../client.pem --tls-client-key-file ../client.key"
    fi
    redis-server --bind 127.0.0.1 --port "$port" --dir . --logfile log --pidfile pid --save '' --appendonly no \
        --cluster-enabled yes --cluster-config-file nodes.conf --cluster-node-timeout "${NODE_TIMEOUT:-5000}" \
        --repl-diskless-sync-delay 0 --cluster-replica-validity-factor 0 $tls &
    echo $! >pid.shell
    cd ..
    hosts="$hosts 127.0.0.1:$member"
    node=$((node + 1))
done
node=0
for port in "$@"; do
    until redis-cli -p "$port" ping >/dev/null 2>&1; do
        # Each node has its own log.
        kill -0 "$(cat "$node/pid.shell")" 2>/dev/null || { tail -n 5 "$node/log"; exit 1; }
        sleep 0.05
    done
    node=$((node + 1))
done
if [ ! -e created ]; then
    tls=
    [ ! -e tls-ports ] || tls='--tls --cacert ca.pem'
    redis-cli $tls --cluster create $hosts --cluster-replicas 1 --cluster-yes >create.log
    touch created
fi
for port in "$@"; do
    until redis-cli -p "$port" cluster info | grep -q 'cluster_state:ok'; do sleep 0.05; done
done
# A replica that is not in sync cannot take over.
for port in "$@"; do
    until redis-cli -p "$port" info replication | grep -qE 'master_link_status:up|state=online'; do sleep 0.05; done
done
touch ready
while :; do wait || true; sleep 1; done
