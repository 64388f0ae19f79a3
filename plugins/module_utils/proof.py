# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The proof of a build: all checks of the build stage for a source tree or an installation, cheapest first."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import (
    binaries,
    capabilities,
    checks,
    child,
    completeness,
    extensions,
    files,
    host,
    identity,
    installation,
    loading,
    probe_site,
    record,
)
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


class Wish(NamedTuple):
    """What the deployment wants of a build.  Capabilities are required only for a drafter that is named."""

    drafter: Optional[capabilities.Drafter] = None
    speculative_config: Mapping[str, Any] = {}
    device: str = "cpu"
    runner: str = "auto"
    manifest: Optional[Mapping[str, Any]] = None
    user: Optional[str] = None
    deadline: float = 120.0
    level: str = "required"
    nested_target: bool = False


def load_nested(folder: Optional[str]) -> bool:
    """Does the target in a folder nest its language model?  False for no folder.  Raises ``DflashError``."""
    if not folder:
        return False
    path = os.path.join(folder, "config.json")
    raw = files.read_json(path)
    if not isinstance(raw, dict):
        raise DflashError("There is no readable config.json of a target.", path, "Name the folder of the target model.")
    return capabilities.is_nested(raw)


def load_drafter(folder: Optional[str]) -> Optional[capabilities.Drafter]:
    """The drafter in a folder with ``config.json``; None for no folder.  Raises ``DflashError``."""
    if not folder:
        return None
    path = os.path.join(folder, "config.json")
    raw = files.read_json(path)
    if not isinstance(raw, dict):
        raise DflashError(
            "There is no readable config.json of a drafter.", path, "Name the folder of a DFlash checkpoint."
        )
    try:
        return capabilities.read_drafter(raw)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise DflashError(
            "This is no configuration of a drafter.", path, "Name the folder of a DFlash checkpoint."
        ) from None


def inspect(
    tree: Optional[str], python: Optional[str], release: Optional[str], wish: Wish
) -> Tuple[List[checks.Check], Dict[str, Any]]:
    """Checks and identity of whichever of the three is given.  Raises ``DflashError`` for one that is not there."""
    if tree:
        found, said = inspect_tree(tree, wish)
    else:
        found, said = inspect_release(release, wish) if release else inspect_python(str(python), wish)
    return in_order(found), said


#: Areas in the order in which a proof is read: what it is, whether it is all there, whether it loads, what it does.
AREAS = ("identity", "complete", "ext", "capability")


def in_order(found: List[checks.Check]) -> List[checks.Check]:
    """The checks by area; within an area as they were found, cheapest first."""
    return sorted(found, key=lambda item: AREAS.index(item["id"].split(".", 1)[0]))


def inspect_tree(tree: str, wish: Wish) -> Tuple[List[checks.Check], Dict[str, Any]]:
    """Checks and identity of a folder that holds ``vllm/`` (a source tree, a clone or an unpacked wheel)."""
    package = os.path.join(tree, "vllm")
    if not os.path.isdir(package):
        raise DflashError("There is no vllm package in the tree.", tree, "Name the folder that holds vllm/.")
    python = child.any_python(wish.user)
    installed = [item for item in record.distributions(tree) if completeness.is_vllm(item.name)]
    said = identity.of_site(tree, installed[0]) if installed else identity.of_tree(tree)
    found = identity.judge(said, wish.manifest, None, wish.level)
    compiled = extensions.present(package)
    if compiled or wish.manifest:
        wanted, certain = _expected(tree, said, wish)
        place = binaries.Place(version=_version(said), serves_here=False)
        found += binaries.examine(package, compiled, wanted, wish.device, wish.level, place, certain)
    if installed:
        found.append(completeness.by_record(tree, installed[0], wish.level))
        found.append(completeness.extra_files(tree, [installed[0].folder], wish.level))
    found += _capabilities(package, python, wish)
    return found, said


def inspect_release(path: str, wish: Wish) -> Tuple[List[checks.Check], Dict[str, Any]]:
    """Checks and identity of a release folder: a venv over a layer, with their manifests."""
    site = record.site_packages(path)
    python = os.path.join(path, "venv", "bin", "python")
    if site is None or not os.path.lexists(python):
        raise DflashError("There is no installed release.", path, "Install the release first.")
    release = files.read_json(os.path.join(path, "manifest.json"))
    return _inspect(python, site, release if isinstance(release, dict) else {}, path, wish)


def inspect_python(python: str, wish: Wish) -> Tuple[List[checks.Check], Dict[str, Any]]:
    """Checks and identity of the vLLM that an interpreter finds."""
    if not os.path.exists(python):
        raise DflashError("There is no such interpreter.", python, "Name a python of a venv that holds vllm.")
    return _inspect(python, None, None, None, wish)


def _inspect(
    python: str, site: Optional[str], release: Optional[Mapping[str, Any]], root: Optional[str], wish: Wish
) -> Tuple[List[checks.Check], Dict[str, Any]]:
    level = wish.level
    outcome = child.run(python, [probe_site], {}, user=wish.user, deadline=wish.deadline)
    seen = outcome.value if outcome.ok else None
    if site is None:
        if seen is None:
            raise DflashError(
                "The interpreter gives no answer: %s." % outcome.reason,
                python,
                "Name an interpreter that the account %r can run." % (wish.user or child.DEFAULT_USER),
            )
        site = completeness.site_of(seen) or (seen["site"][0] if seen["site"] else os.path.dirname(python))
    package = os.path.join(site, "vllm")
    installed = [item for item in record.distributions(site) if completeness.is_vllm(item.name)]
    said = dict(identity.of_site(site, installed[0] if installed else None), python=(seen or {}).get("version"))
    found = identity.judge(said, wish.manifest, release, level)
    found.append(installation.distribution(site, installed, seen, outcome.reason, level))
    found.append(installation.leftovers(site, level))
    found.append(installation.shadow(site, seen, installation.started_from() if root is None else [], level))
    found.append(installation.owners(site, level))
    compiled = extensions.present(package)
    layer = completeness.layer_folder(root, release)
    sites = [item for item in (record.site_packages(layer) if layer else None, site) if item]
    sites += [item for item in (seen or {}).get("site_packages", []) if item not in sites]
    place = binaries.Place(
        sites=sites,
        python=python,
        installed=(seen or {}).get("installed", []),
        torch_cuda=binaries.torch_cuda(sites),
        version=_version(said),
        built_with=(wish.manifest or {}).get("cuda") or None,
        gpus=host.compute_capabilities() if wish.device == "cuda" else (),
    )
    wanted, certain = _expected(site, said, wish)
    with ThreadPoolExecutor(max_workers=1) as pool:  # torch loads while the files are hashed
        loaded = pool.submit(
            loading.examine,
            python,
            package,
            compiled,
            wanted,
            wish.device,
            user=wish.user,
            deadline=wish.deadline,
            level=level,
        )
        found += binaries.examine(package, compiled, wanted, wish.device, level, place, certain)
        found += completeness.others(site, installed, seen, layer, level)
        found += _capabilities(package, python if seen else child.any_python(wish.user), wish)
        return found + loaded.result(), said


def _capabilities(package: str, python: str, wish: Wish) -> List[checks.Check]:
    required = capabilities.required_ids(
        package, wish.device, wish.drafter, wish.speculative_config, wish.runner, wish.nested_target
    )
    return capabilities.examine(package, python, wish.drafter, required, user=wish.user, deadline=wish.deadline)


#: A version that is a release's own number; what stands after it may only name a device.
RELEASE = re.compile(r"^\d+\.\d+\.\d+(\+(cu\d+|cpu|rocm\w*))?$")


def _version(said: Mapping[str, Any]) -> str:
    return str(said["version"] or said["package_version"] or "")


def _expected(folder: str, said: Mapping[str, Any], wish: Wish) -> Tuple[List[extensions.Expected], bool]:
    """Expected extensions, and whether the list is this build's own.

    By the build's manifest, else by the source beside it, else by the release's number; the number of a fork or of
    a commit between releases is only near one.
    """
    listed = (wish.manifest or {}).get("extensions")
    if listed:
        return [extensions.Expected(item["module"], bool(item.get("required", True))) for item in listed], True
    setup = os.path.join(folder, "setup.py")
    if os.path.isfile(setup):
        try:
            with open(setup, encoding="utf-8", errors="replace") as handle:
                return extensions.from_setup(handle.read(), wish.device), True
        except (SyntaxError, ValueError):
            pass  # another language's setup.py says nothing
    version = str(said["package_version"] or said["version"] or "")
    return extensions.from_release(version, wish.device), bool(RELEASE.match(version))
