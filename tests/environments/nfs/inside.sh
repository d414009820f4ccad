#!/bin/sh
# The first process of the machine: a server of NFS, and two nodes with a mount of it at /mnt/nfs each.
# A node has a network, mounts and a name of its own, so to the server it is another client.
set -e
trap 'sync; echo o > /proc/sysrq-trigger; sleep 60' EXIT
unpacked=$BUILD/unpacked
export PATH=$unpacked/usr/sbin:$unpacked/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export LD_LIBRARY_PATH=$unpacked/usr/lib/x86_64-linux-gnu:$unpacked/lib/x86_64-linux-gnu

mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir /dev/shm
for folder in /run /mnt /dev/shm /var/lib; do  # the rest is the host's, and stays as it is
    mount -t tmpfs tmpfs "$folder"
done
mkdir -p /run/modules/lib /mnt/disk /mnt/nfs /mnt/home /var/lib/nfs/v4recovery
ln -s "$unpacked/usr/lib/uml/modules" /run/modules/lib/modules
ln -s "$unpacked/bin/kmod" /run/modprobe
for module in nfsd nfsv4 veth; do
    /run/modprobe -d /run/modules "$module"
done

mount -t ext4 /dev/ubda /mnt/disk
mount -t nfsd nfsd /proc/fs/nfsd
echo 10 > /proc/fs/nfsd/nfsv4leasetime  # seconds that a silent client keeps its locks
echo 10 > /proc/fs/nfsd/nfsv4gracetime
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
exportfs -i -o rw,no_root_squash,fsid=0,insecure,no_subtree_check '*:/mnt/disk'
rpc.mountd -N 2 -N 3
rpc.nfsd -N 3 8

node() {
    name=$1 net=$2
    unshare --net --mount --uts sleep infinity &
    pid=$!
    echo $pid > "/run/$name.pid"
    until [ "$(readlink /proc/$pid/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
    ip link add "$name" type veth peer name eth0 netns $pid
    ip addr add "$net.1/24" dev "$name"
    ip link set "$name" up
    on "$name" sh -ec "
        hostname $name
        ip link set lo up
        ip addr add $net.2/24 dev eth0
        ip link set eth0 up
        ip route add default via $net.1
        mount.nfs4 $net.1:/ /mnt/nfs -o vers=4.2
    "
}
on() {
    name=$1
    shift
    nsenter -t "$(cat "/run/$name.pid")" --net --mount --uts "$@"
}
node one 10.0.1
node two 10.0.2

unset LD_LIBRARY_PATH
set +e
on one env HOME=/mnt/home TMPDIR=/mnt PYTHONDONTWRITEBYTECODE=1 sh "$BUILD/job.sh" < /dev/null
echo $? > "$BUILD/exit-code"
