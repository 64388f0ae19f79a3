#!/usr/bin/env bash
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
#
# Makes .venv from the lock and picks this clone's port.  Installs nothing outside the clone.
# PYTHON=path names the interpreter; without it the first usable one of 3.11 or newer is taken.
# DFLASH_VENV=folder names another folder than .venv.
# A second call with nothing to do ends in a few milliseconds.
set -eu
cd "$(dirname "$0")/.."
venv=${DFLASH_VENV:-.venv}
exec 9<pyproject.toml
flock 9 # two runs in one clone take turns

die() {
    echo "setup: $*" >&2
    exit 2
}

# Tried by running it: a shim on PATH may exist and still not run.
usable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || die "PYTHON=$PYTHON is not a Python of 3.11 or newer that runs."
        echo "$PYTHON"
        return
    fi
    local name
    for name in /usr/bin/python3.11 python3.11 /usr/bin/python3.12 python3.12 /usr/bin/python3 python3 python3.13 python3.14; do
        if usable "$name"; then
            echo "$name"
            return
        fi
    done
    die "no Python of 3.11 or newer was found. Fix: install python3.11, or name one: make setup PYTHON=/path/to/python3.11"
}

lock_for() { # 3.11 takes one ansible-core, 3.12 and newer another
    case "$1" in
    3.11) echo requirements/dev-py311.lock ;;
    *) echo requirements/dev-py312.lock ;;
    esac
}

stamp=$venv/.dflash-setup
done_already() {
    [ -f "$stamp" ] && [ -x "$venv/bin/python" ] || return 1
    local lock hash wanted place
    { read -r lock hash && read -r wanted && read -r place; } <"$stamp" || return 1
    [ "$place" = "$PWD" ] && [ -f "$lock" ] && [ "$(sha256sum <"$lock")" = "$hash  -" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$PYTHON" = "$wanted" ]
}

if ! done_already; then
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    lock=$(lock_for "$version")
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        die "$python cannot make virtual environments. Fix: apt-get install python$version-venv"
    echo "setup: making $venv with $python ($version) from $lock"
    rm -rf "$venv"
    "$python" -m venv "$venv" || die "could not make $venv with $python."
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
        --require-hashes --no-deps --only-binary :all: -r "$lock" ||
        die "the packages of $lock could not be installed. Fix: check the network and pip's configuration, then run it again"
    "$venv/bin/python" -m pip check >/dev/null || die "$lock is not consistent: $("$venv/bin/python" -m pip check | sed -n 1p)"
    # The place counts too: scripts in a virtual environment do not survive a move of the clone.
    printf '%s %s\n%s\n%s\n' "$lock" "$(sha256sum <"$lock" | cut -d ' ' -f 1)" "$python" "$PWD" >"$stamp"
fi

local=inventory/group_vars/all/local.yml
if ! grep -q '^dflash_serve_port:' "$local" 2>/dev/null; then
    mkdir -p "${local%/*}"
    "$venv/bin/python" tools/free_port.py >"$local.new"
    [ ! -f "$local" ] || grep -vx -e --- "$local" >>"$local.new" || true
    mv "$local.new" "$local"
fi
