#!/usr/bin/env bash
# The tests on a CPython that has no interpreter lock:
#
#     tests/freethreaded.sh [PYTEST'S ARGUMENTS...]
#
# No registry has one, so it is built from Debian's source, without optimisation, into .pythons/3.13t, where it
# stays for the next time. A test that needs a package without a wheel for it (cryptography) fails.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=trixie source=python3.13 folder=$PWD/.pythons/3.13t
if ! test -e "$folder/complete"; then
    packages="dpkg-dev libbz2-dev libffi-dev liblzma-dev libsqlite3-dev libssl-dev zlib1g-dev"
    # shellcheck disable=SC2086
    dpkg -s $packages >/dev/null 2>&1 || {
        apt-get update -q
        apt-get install -qy --no-install-recommends $packages
    }
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sed -n 1p)
    apt=$(mktemp -d)
    trap 'rm -rf "$apt"' EXIT
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/source"
    key=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb-src [signed-by=$key] $mirror $suite main" > "$apt/sources.list"
    cat > "$apt/conf" <<END
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$apt/lists";
Dir::Cache "$apt/cache";
END
    export APT_CONFIG=$apt/conf
    apt-get update -q
    (cd "$apt/source" && apt-get source -q --download-only $source && tar xf ./*.orig.tar.xz)
    cd "$apt"/source/Python-*/
    ./configure -q --disable-gil --prefix="$folder" --disable-test-modules --with-ensurepip=install
    make -s -j"$(nproc)"
    make -s altinstall
    cd "$OLDPWD"
    touch "$folder/complete"
fi
python=("$folder"/bin/python3.*t)
"${python[0]}" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --only-binary=:all: \
    numpy ml_dtypes hypothesis pytest pytest-timeout hatchling editables
export PYTHONPATH=$PWD MESHLIB_NATIVE=1
"${python[0]}" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-build-isolation \
    --no-deps --editable .
"${python[0]}" -c 'import sys; from transport._native import core; assert core and not sys._is_gil_enabled(), core'
exec "${python[0]}" -X faulthandler -m pytest -p no:cacheprovider "$@"
