# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The names of things: each id is a hash of what makes the thing, and of nothing else."""

from __future__ import annotations

from typing import Any, Dict, Mapping

from ansible_collections.dflash.fleet.plugins.module_utils.files import short_hash


def build_id(spec: Mapping[str, Any]) -> str:
    """Hash of what makes the wheel.  ``spec`` is the build specification made by ``plan.build_spec``."""
    return short_hash({"kind": "build", "spec": spec})


def layer_id(requirements_lock: str, python_version: str) -> str:
    """Hash of the requirements lock's text and the exact Python version (``3.11.2``) of the layer."""
    return short_hash({"kind": "layer", "lock": requirements_lock, "python": python_version})


def release_id(build: str, layer: str) -> str:
    """Hash of a build id and a layer id."""
    return short_hash({"kind": "release", "build": build, "layer": layer})


def deployment_id(release: str, rendered: Mapping[str, str], models: Mapping[str, Any], instance: str) -> str:
    """Hash of release id, rendered configuration (no secret in it), models by revision, instance name."""
    parts: Dict[str, Any] = {
        "kind": "deployment",
        "release": release,
        "rendered": dict(rendered),
        "models": dict(models),
        "instance": instance,
    }
    return short_hash(parts)
