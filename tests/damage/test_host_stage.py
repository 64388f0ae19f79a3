# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""For every check of the stage host, a real damage of this host's surroundings or of a shipped pair that fails it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from damage_lab import REPO

from ansible_collections.dflash.fleet.plugins.module_utils import checks, host, pairing, preflight

PAIR = REPO / "canary" / "pairs" / "cpu"


@pytest.fixture
def place() -> Iterator[Path]:
    """A short folder that the service account may enter."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-host-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def gather(place: Path, **changes: Any) -> dict[str, Any]:
    asked = {
        "root": str(place),
        "user": "nobody",
        "python": "python3",
        "address": "127.0.0.1",
        "port": host.free_port(),
        "instance": "none",
        **changes,
    }
    return preflight.gather(**asked)


def judged(
    facts: dict[str, Any], device: str = "cpu", disk: float = 0.1, memory: float = 0.1
) -> dict[str, checks.Check]:
    return {item["id"]: item for item in preflight.judge(facts, device, disk, memory)}


def against(found: dict[str, checks.Check]) -> set[str]:
    return {name for name, item in found.items() if item["status"] != "pass"}


def test_this_host_is_right(place: Path) -> None:
    assert against(judged(gather(place))) == set()


def closed(place: Path) -> Path:
    (place / "home" / "root").mkdir(parents=True)
    (place / "home").chmod(0o700)
    return place / "home" / "root"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root serves as another account")
def test_a_root_below_a_closed_home(place: Path) -> None:
    found = judged(gather(closed(place)))
    assert against(found) == {"host.root"}
    assert f"cannot enter {place}/home" in found["host.root"]["actual"]


def test_a_root_that_is_too_long(place: Path) -> None:
    found = judged(gather(place / ("x" * 40)))
    assert against(found) == {"host.root"} and "characters long" in found["host.root"]["actual"]


def test_a_python_that_is_not_there(place: Path) -> None:
    found = judged(gather(place, python="/var/tmp/no/python3.99"))
    assert against(found) == {"host.platform", "host.python"} or against(found) == {"host.python"}
    assert "/var/tmp/no/python3.99" in found["host.python"]["actual"]


def test_a_python_without_venv(place: Path) -> None:
    """The system's python3 without its venv package: the same interpreter, behind a wrapper that has no ensurepip."""
    wrapper = place / "python3"
    wrapper.write_text("#!/bin/sh\nexec /usr/bin/python3 -I -c \"import sys; sys.modules['ensurepip'] = None\n$3\"\n")
    wrapper.chmod(0o755)
    found = judged(gather(place, python=str(wrapper)))
    assert against(found) == {"host.python"} and "without venv" in found["host.python"]["actual"]


def test_a_port_that_another_process_holds(place: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        found = judged(gather(place, port=other.getsockname()[1]))
    assert against(found) == {"host.port"} and "pid %d" % os.getpid() in found["host.port"]["actual"]


def test_too_little_of_what_there_is(place: Path) -> None:
    facts = gather(place)
    assert against(judged(facts, disk=facts["disk_gib"] + 1)) == {"host.disk"}
    assert against(judged(facts, memory=facts["memory_gib"] + 1)) == {"host.memory"}


def test_a_repository_that_is_none(place: Path) -> None:
    found = judged(gather(place, source_repo=f"file://{place}/gone.git"))
    assert against(found) == {"host.source"} and "gone.git" in found["host.source"]["actual"]


def test_git_is_not_installed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of programs, without git in them."""
    (place / "bin").mkdir()
    for name in ("gcc", "python3"):
        (place / "bin" / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setattr(host, "SEARCH", str(place / "bin"))
    found = judged(gather(place))
    assert against(found) == {"host.tools"} and found["host.tools"]["actual"] == "gcc"


@pytest.fixture
def proc(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[str], str]], None]:
    """Let the host's own files say something else."""
    read = host._text

    def install(path: str, change: Callable[[str], str]) -> None:
        monkeypatch.setattr(host, "_text", lambda asked: change(read(asked)) if asked == path else read(asked))

    return install


def test_a_processor_without_avx2(place: Path, proc: Callable[..., None]) -> None:
    proc("/proc/cpuinfo", lambda text: text.replace(" avx2", ""))
    found = judged(gather(place))
    assert against(found) == {"host.cpu_flags"} and "avx2" not in found["host.cpu_flags"]["actual"].split()


def test_a_folder_that_runs_no_programs(place: Path, proc: Callable[..., None]) -> None:
    proc("/proc/self/mounts", lambda text: text + f"tmpfs {place} tmpfs rw,noexec 0 0\n")
    found = judged(gather(place))
    assert against(found) == {"host.root"} and "noexec" in found["host.root"]["actual"]


def test_another_machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    found = judged(gather(place))
    assert against(found) == {"host.platform"} and "aarch64" in found["host.platform"]["actual"]


def test_a_cuda_host_with_an_old_driver_and_an_old_gpu(
    place: Path, proc: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi and the driver's file as they answer on such hosts."""
    tool = place / "nvidia-smi"
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  %s  Fri Nov 28\n"
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    for capability, driver, wrong in (
        ("9.0", "580.65.06", set()),
        ("7.0", "580.65.06", {"host.gpu"}),
        ("9.0", "570.12.01", {"host.driver"}),
    ):
        tool.write_text(f"#!/bin/sh\necho {capability}\n")
        tool.chmod(0o755)
        proc("/proc/driver/nvidia/version", lambda _text, driver=driver: line % driver)
        facts = dict(gather(place), headers=True)
        found = judged(facts, "cuda")
        assert against(found) - {"host.headers"} == wrong
    assert "570.12.01" in found["host.driver"]["actual"]


def test_a_cuda_host_without_headers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    glob = preflight.glob.glob
    monkeypatch.setattr(preflight.glob, "glob", lambda name: [] if name.endswith("Python.h") else glob(name))
    found = judged(gather(place), "cuda")
    assert found["host.headers"]["status"] == "fail" and "Python.h missing" in found["host.headers"]["actual"]


# ---------------------------------------------------------------------- pairs


def shipped() -> tuple[dict[str, Any], dict[str, Any]]:
    target = json.loads((PAIR / "target" / "config.json").read_text())
    return target, json.loads((PAIR / "drafter_full" / "config.json").read_text())


def examine(target: dict[str, Any], drafter: dict[str, Any], **more: Any) -> dict[str, checks.Check]:
    return {item["id"]: item for item in pairing.examine(target, drafter, **more)["checks"]}


def test_the_shipped_pair_is_right() -> None:
    assert against(examine(*shipped())) == set()


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(drafter: dict[str, Any]) -> None:
        drafter[key] = value

    return change


def far_tap(drafter: dict[str, Any]) -> None:
    drafter["dflash_config"]["target_layer_ids"] = [1, 16, 31, 46, 61]


def mixed(drafter: dict[str, Any]) -> None:
    count = drafter["num_hidden_layers"]
    drafter.update(
        layer_types=["sliding_attention"] * (count - 1) + ["full_attention"],
        sliding_window=2048,
        use_sliding_window=True,
    )


@pytest.mark.parametrize(
    "check_id, damage, more, says",
    [
        ("pair.architecture", changed("architectures", ["LlamaForCausalLMEagle3"]), {}, "EAGLE-3"),
        ("pair.hidden_size", changed("hidden_size", 999), {}, "999"),
        ("pair.layers", far_tap, {}, "62"),
        ("pair.vocab", changed("vocab_size", 17), {}, "17"),
        ("pair.block_size", lambda drafter: None, {"k": 999}, "999"),
        ("pair.runner", mixed, {"device": "cpu"}, "V2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_damage_of_a_configuration_is_named(
    check_id: str, damage: Callable[[dict[str, Any]], None], more: dict[str, Any], says: str
) -> None:
    target, drafter = shipped()
    damage(drafter)
    found = examine(target, drafter, **more)
    assert found[check_id]["status"] == "fail"
    assert says in checks.sentence(found[check_id])
    assert against(found) - {check_id} <= {"pair.layers", "pair.vocab"}, against(found)
