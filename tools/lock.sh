#!/usr/bin/env bash
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
#
# Resolves pyproject.toml anew into requirements/*.lock, with hashes, for Python 3.11 and 3.12.
# Needs uv on PATH or named by UV=.  Add --upgrade to take newer versions.
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-uv}
for python in 3.11 3.12; do
    tag=py${python/./}
    for kind in runtime dev; do
        extra=()
        [ "$kind" = runtime ] || extra=(--extra dev)
        "$uv" pip compile --quiet pyproject.toml "${extra[@]}" --constraint "requirements/$tag.constraints" \
            --python-version "$python" --generate-hashes --no-emit-index-url --no-emit-find-links \
            --no-annotate --no-header --output-file "requirements/$kind-$tag.lock" "$@"
        echo "requirements/$kind-$tag.lock: $(grep -c == "requirements/$kind-$tag.lock") packages"
    done
done
