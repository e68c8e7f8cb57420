#!/usr/bin/env bash
# Debian's Python of any suite, of this machine or an emulated one (QEMU):
#
#     tests/foreign.sh ARCH SUITE                        print the folder that it lies in
#     tests/foreign.sh ARCH SUITE COMMAND [ARGUMENTS...] run a bash command there, in /
#
# ARCH is Debian's name, arm64 or amd64. The folder stays for the next time. What runs foreign programs is
# registered in a user namespace of its own (Linux 6.7), and all ends with the command.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=$1 suite=$2 root=$PWD/.debian/$1-$2
shift 2
if ! test -e "$root/complete"; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sed -n 1p)
    rm -rf "$root"
    mkdir -p .debian
    debootstrap --foreign --arch="$arch" --variant=minbase --include=libpython3-dev,procps,python3 \
        "$suite" "$root" ${mirror:+"$mirror"} >&2
    # Unpacked is enough. To configure packages takes many minutes under emulation.
    for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
    for folder in proc src; do rm -rf "${root:?}/$folder" && mkdir "$root/$folder"; done
    printf '/src\n/site\n' > "$root/usr/lib/python3/dist-packages/meshlib.pth"
    touch "$root/complete"
fi
if test $# = 0; then
    echo "$root"
    exit
fi
export ARCH=$arch QEMU OUTSIDE INSIDE=$1
shift
QEMU=$(command -v qemu-aarch64-static || true)
OUTSIDE='
    if test "$ARCH" = arm64; then
        mount -t proc proc /proc && mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
        magic="\\x7fELF\\x02\\x01\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x00\\xb7\\x00"
        mask="\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xfe\\xff\\xff\\xff"
        printf "%s" ":qemu-aarch64:M::$magic:$mask:$QEMU:F" > /proc/sys/fs/binfmt_misc/register
    fi
    ip link set lo up
    mount --bind . . && cd "$PWD"
    mount -t proc proc proc && mount --rbind /sys sys && mount --rbind /dev dev && mount -t tmpfs tmpfs tmp
    export PATH=/usr/sbin:/usr/bin HOME=/tmp
    exec chroot . /bin/bash -euc "$INSIDE" foreign "$@"'
cd "$root"
exec unshare --user --map-root-user --mount --net --pid --fork --kill-child bash -euc "$OUTSIDE" foreign "$@"
