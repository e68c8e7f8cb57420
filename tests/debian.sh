#!/usr/bin/env bash
# The tests on the Python of another Debian suite (trixie has 3.13, sid the newest):
#
#     tests/debian.sh SUITE [PYTEST'S ARGUMENTS...]
#
# The suite lies in .debian/SUITE, where it stays for the next time. It gets a clone of what is
# committed. Its mounts and processes are in namespaces of their own, and end with the command.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=$1 root=$PWD/.debian/$1
shift
if ! test -e "$root/complete"; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sed -n 1p)
    mkdir -p .debian
    packages=python3,python3-venv,python3-dev,gcc,libc6-dev,ca-certificates,git,iproute2,make,procps
    debootstrap --variant=minbase --include=$packages "$suite" "$root" ${mirror:+"$mirror"}
    touch "$root/complete"
fi
# What names are resolved by (this host's own too: Gloo looks it up), and what pip goes by here.
for file in /etc/hosts /etc/resolv.conf /etc/pip.conf /etc/xdg/pip /etc/ssl/certs/ca-certificates.crt; do
    test ! -e $file || { mkdir -p "$root${file%/*}" && cp -rLT $file "$root$file"; }
done
rm -rf "$root/src"
git clone --quiet . "$root/src"
export OUTSIDE='
    mount --bind . . && cd "$PWD"  # the root of a file system, as namespaces within need it
    mount -t proc proc proc && mount --rbind /sys sys && mount --rbind /dev dev
    mount -t tmpfs tmpfs dev/shm && mount -t tmpfs tmpfs tmp
    chroot . bash -euc "$INSIDE" tests "$@"
    exit $?  # a shell that stays takes in the processes whose parents are gone'
export INSIDE='
    cd /src
    test -x /venv/bin/python || python3 -m venv /venv
    /venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
    # Again, now that jaxlib is there, whose header the core is compiled with.
    /venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
    /venv/bin/python --version
    /venv/bin/python -m pytest "$@"
    exit $?'
cd "$root"
exec unshare --mount --pid --fork --kill-child --propagation private bash -euc "$OUTSIDE" tests "$@"
