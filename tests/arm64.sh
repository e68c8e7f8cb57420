#!/usr/bin/env bash
# The engine and its tests on aarch64, emulated by QEMU:
#
#     tests/arm64.sh [PYTEST'S ARGUMENTS...]
#
# Debian's Python for arm64 (tests/foreign.sh) gets a clone of what is committed, and a core that a cross compiler
# builds. QEMU on x86-64 never reorders what a weaker order allows: that no order is too weak is shown by
# `make sanitize`.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=aarch64-linux-gnu-gcc
root=$(tests/foreign.sh arm64 trixie)
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

exec tests/foreign.sh arm64 trixie '
    cd /src
    python3 -c "import platform, sys; print(platform.machine(), sys.version)"
    exec python3 -m pytest -p no:cacheprovider "$@"' "$@"
