# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Builds that are broken on purpose: `import vllm` answers, the text is right, and they are not proven."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import harness
import pytest

#: The checks that a cut library fails, in the order of the proof: files first, then the process that loads it.
CUT = ["complete.record", "ext.elf", "ext.import:vllm._C"]


@pytest.mark.parametrize(("fault", "named"), [("layer_offset", ["capability.layer_offset.v1"]), ("truncated_so", CUT)])
def test_a_broken_candidate_is_refused(proven: harness.Clone, fault: str, named: list[str]) -> None:
    """Refused, named by the check that belongs to it, while the server that was proven serves on untouched."""
    before, serving = proven.host(), proven.server()
    run = proven.demo(fault)
    assert run.code == 0
    host = proven.host()
    assert host["state"] == "refused"
    assert harness.against(host["checks"]) == named
    assert host["build_id"] != before["build_id"] and host["release_id"] not in ("", before["release_id"])
    assert host["commit"] not in ("", before["commit"])
    # What the fault's name promises: the package answers, whole or not.
    release = Path(proven.root) / "releases" / host["release_id"]
    said = subprocess.run(
        [str(release / "venv/bin/python"), "-I", "-c", "import vllm; print(vllm.__version__)"],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0 and host["commit"][:8] in said.stdout
    assert proven.server() == serving and proven.alive()
    # Damage to one release leaves the layer and the other release whole: the next run has nothing to do.
    again = proven.demo()
    assert again.code == 0 and proven.host()["state"] == "unchanged"
    assert len(list((Path(proven.root) / "layers").glob("*/manifest.json"))) == 1


def test_the_canary_alone_catches_the_offset(proven: harness.Clone, tmp_path: Path) -> None:
    """In a checkout that cannot read this function the probe says unknown, and the canary pair decides."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(harness.REPO), str(clone)], check=True)
    shutil.copy(harness.REPO / "inventory/group_vars/all/local.yml", clone / "inventory/group_vars/all/local.yml")
    symbols = clone / "plugins/module_utils/symbols.py"
    text = symbols.read_text(encoding="utf-8")
    assert text.count('"capability.layer_offset.v1": [') == 1
    symbols.write_text(
        text.replace('"capability.layer_offset.v1": [', '"capability.no_such_check": ['), encoding="utf-8"
    )
    blind = harness.Clone(clone, str(proven.venv), proven.root)
    before = proven.host()["deployment_id"]
    extra = {
        "dflash_root": proven.root,
        "vllm_source_lock_file": str(tmp_path / "lock.json"),
        "demo_break": "layer_offset",
        "vllm_source_series": [
            *(f"demo/series/{name}" for name in sorted(os.listdir(clone / "demo/series")) if name.endswith(".patch")),
            "demo/breaks/layer_offset.patch",
        ],
    }
    run = blind.playbook("demo/break.yml", **extra)
    assert run.code != 0
    host = blind.host()
    assert host["state"] == "rolled_back"
    found = harness.by_id(host["checks"])
    assert found["capability.layer_offset.v1"]["status"] == "unknown"
    assert [name for name in harness.against(host["checks"]) if name != "capability.layer_offset.v1"] == [
        "serving.canary_al",
        "serving.al",
    ]
    assert found["serving.aux_layers"]["status"] == "fail", "the log says the same, as advice"
    assert found["serving.canary_al"]["actual"] == 1.0 and found["serving.al"]["actual"] == 1.0
    assert found["serving.text"]["status"] == "pass", "the fault is silent: the text is right"
    # The deployment before serves again, newly proven; a plain run has nothing to do.
    assert host["serves"] == before
    assert json.loads((proven.instance() / "current" / "proof.json").read_text(encoding="utf-8"))["ok"] is True
    assert proven.demo().code == 0
    assert proven.host()["state"] == "unchanged" and proven.host()["deployment_id"] == before
