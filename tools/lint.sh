#!/usr/bin/env bash
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
#
# Every linter, offline.  All of them run even if one fails; the last line is the result.
set -u
cd "$(dirname "$0")/.."
export ANSIBLE_HOME="$PWD/.cache/ansible" # nothing is left in the home folder
export PATH="$PWD/.venv/bin:$PATH" ANSIBLE_CONFIG="$PWD/ansible.cfg" PYTHONDONTWRITEBYTECODE=1 NO_COLOR=1
utils=collections/ansible_collections/dflash/fleet/plugins/module_utils
failed=()

run() { # name, command...
    local name=$1 start=$SECONDS output
    shift
    if output=$("$@" 2>&1); then
        echo "lint: $name ok ($((SECONDS - start)) s)"
    else
        failed+=("$name")
        echo "lint: $name FAILED ($*)"
        printf '%s\n' "$output" | sed 's/^/    /'
    fi
}

syntax() {
    local playbook rc=0
    for playbook in ./*_dflash.yml; do
        [ -e "$playbook" ] || continue
        ansible-playbook --syntax-check -i inventory "$playbook" || rc=1
    done
    return $rc
}

shells() {
    local script rc=0
    while read -r script; do
        bash -n "$script" || rc=1
    done < <(git ls-files -z | xargs -0 grep -lE '^#!/usr/bin/env bash' --)
    return $rc
}

run ruff ruff check --no-cache --output-format concise .
run yamllint yamllint .
# 3.10 is the oldest Python that mypy still knows; ruff holds plugins/ to 3.9's syntax.
run mypy-hosts mypy --cache-dir .cache/mypy --python-version 3.10 "$utils"
run mypy-api mypy --cache-dir .cache/mypy --python-version 3.11 dflash_fleet
run shell shells
run syntax syntax
run ansible-lint ansible-lint --offline --nocolor
if [ ${#failed[@]} -gt 0 ]; then
    echo "lint: FAILED: ${failed[*]}"
    exit 1
fi
echo "lint: ok in $SECONDS s"
