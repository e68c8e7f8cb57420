#!/usr/bin/env bash
# The engine and its tests on aarch64, emulated by QEMU:
#
#     tests/arm64.sh [PYTEST'S ARGUMENTS...]
#
# Debian's Python for arm64 lies in .debian/arm64, where it stays for the next time. It gets a clone of what
# is committed, and a core that a cross compiler builds. What runs foreign programs is registered in a user
# namespace of its own (Linux 6.7), and all ends with the command. QEMU on x86-64 never reorders what a weaker
# order allows: that no order is too weak is shown by `make sanitize`.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/.debian/arm64 suite=trixie compiler=aarch64-linux-gnu-gcc
if ! test -e "$root/complete"; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sed -n 1p)
    rm -rf "$root"
    mkdir -p .debian
    debootstrap --foreign --arch=arm64 --variant=minbase --include=libpython3-dev,procps,python3 \
        "$suite" "$root" ${mirror:+"$mirror"}
    # Unpacked is enough. To configure packages takes many minutes under emulation.
    for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
    for folder in proc src; do rm -rf "${root:?}/$folder" && mkdir "$root/$folder"; done
    touch "$root/complete"
fi
version=$(cd "$root/usr/include" && ls -d python3.*)
platforms=$(for glibc in 28 27 17; do echo "--platform manylinux_2_${glibc}_aarch64"; done)
test -e "$root/site/complete" || {
    # shellcheck disable=SC2086
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --target "$root/site" \
        $platforms --platform manylinux2014_aarch64 --python-version "${version#python}" --only-binary=:all: \
        numpy ml_dtypes hypothesis pytest pytest-timeout trustme
    touch "$root/site/complete"
}
rm -rf "$root/src"
git clone --quiet . "$root/src"
printf '/src\n/site\n' > "$root/usr/lib/python3/dist-packages/meshlib.pth"
flags=$(.venv/bin/python -c 'import hatch_build; print(*hatch_build.FLAGS)')
(
    cd "$root/src"
    mapfile -t sources < <(find transport/_native -name '*.c' | sort)
    # Python's own headers find those of one machine by a path from the second folder.
    # shellcheck disable=SC2086
    $compiler $flags -I "$root/usr/include/$version" -idirafter "$root/usr/include" -I transport/_native \
        "${sources[@]}" -o "transport/_native/_core.cpython-${version//[a-z.]/}-aarch64-linux-gnu.so"
)

# The engine alone first, with pages of both sizes that ARM's kernels have.
protocol=$root/protocol
$compiler -std=gnu11 -D_GNU_SOURCE -O2 -pthread -static -Wl,--wrap=sleep_on -I "$root/src/transport/_native" \
    "$root"/src/tests/transport/native/protocol.c "$root"/src/transport/_native/engine/{,kernels/}*.c -o "$protocol"
for page in 4096 65536; do
    for size in 2 3 4; do qemu-aarch64-static -p $page "$protocol" calls $size 1000 $size; done
    qemu-aarch64-static -p $page "$protocol" damage 3 20 3
done

export QEMU OUTSIDE INSIDE
QEMU=$(command -v qemu-aarch64-static)
OUTSIDE='
    mount -t proc proc /proc && mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    magic="\\x7fELF\\x02\\x01\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x00\\xb7\\x00"
    mask="\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xfe\\xff\\xff\\xff"
    printf "%s" ":qemu-aarch64:M::$magic:$mask:$QEMU:F" > /proc/sys/fs/binfmt_misc/register
    ip link set lo up
    mount --bind . . && cd "$PWD"
    mount -t proc proc proc && mount --rbind /sys sys && mount --rbind /dev dev && mount -t tmpfs tmpfs tmp
    exec chroot . /bin/bash -euc "$INSIDE" tests "$@"'
INSIDE='
    cd /src
    export PATH=/usr/sbin:/usr/bin HOME=/tmp
    python3 -c "import platform, sys; print(platform.machine(), sys.version)"
    exec python3 -m pytest -p no:cacheprovider "$@"'
cd "$root"
exec unshare --user --map-root-user --mount --net --pid --fork --kill-child bash -euc "$OUTSIDE" tests "$@"
