# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""From typed inputs and a host's own facts to the build that this host needs.  Pure."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping

from ansible_collections.dflash.fleet.plugins.module_utils.files import short_hash


def build_spec(inputs: Mapping[str, Any], pin: Mapping[str, Any], python: Mapping[str, str]) -> Dict[str, Any]:
    """The build specification: all that makes the wheel and its requirements lock, and nothing else.

    ``pin`` is what ``vllm_pin`` returns, ``python`` what ``host.python`` returns.  ``ids.build_id``
    of it names the build.  The repository and the ref are not in it: the commit says it all.
    """
    cuda = inputs["vllm_build_device"] == "cuda"
    precompiled = None
    if inputs["vllm_build_mode"] == "precompiled":
        precompiled = {
            "requirement": inputs["vllm_build_precompiled_wheel"],
            "base": inputs["vllm_build_precompiled_base"],
        }
    spec = {
        "pin": pin["commit"],
        "series": [patch["sha256"] for patch in pin["series"]],
        "mode": inputs["vllm_build_mode"],
        "device": inputs["vllm_build_device"],
        "python_tag": python["tag"],
        "platform": python["platform"],
        "torch": "",
        "cuda": inputs["vllm_toolchain_cuda"] if cuda else "",
        "architectures": [],
        "precompiled": precompiled,
        "exclude": sorted(inputs["vllm_release_exclude"]),
        "index": {"extra_index_urls": list(inputs["vllm_release_extra_index_urls"])},
        "flags": {},
    }
    # In the id although the wheel is the same: a host is compared by ids, and a requirement outside of them would
    # never be asked of a build that is there already.  Nothing required leaves ids as they were.
    if inputs.get("vllm_source_requires_commits"):
        spec["requires_commits"] = sorted(set(inputs["vllm_source_requires_commits"]))
    return spec


def requirements_spec(inputs: Mapping[str, Any], python: Mapping[str, str]) -> str:
    """Hash of what shapes the layer beside the wheel's own requirements."""
    return short_hash(
        {
            "exclude": sorted(inputs["vllm_release_exclude"]),
            "index": list(inputs["vllm_release_extra_index_urls"]),
            "python": python["version"],
        }
    )


def judged(inputs: Mapping[str, Any], canary: Mapping[str, str], prompts: Iterable[Mapping[str, str]]) -> str:
    """Hash of what the gate judges by: when it changes, the host is judged again without a restart."""
    floors = {
        name: inputs[name]
        for name in (
            "dflash_accept_floor",
            "dflash_accept_min_drafts",
            "dflash_accept_canary_floor",
            "dflash_accept_canary_min_drafts",
            "dflash_accept_url",
        )
    }
    return short_hash(
        {
            "floors": floors,
            "canary": dict(canary),
            "prompts": list(prompts),
            "accept_unknown": sorted(inputs["dflash_accept_unknown"]),
        }
    )


def builders(hosts: Mapping[str, Mapping[str, Any]]) -> Dict[str, str]:
    """``{build id: builder}`` for the hosts that need a wheel.

    ``hosts`` is ``{name: {build_id, glibc, has_release, build_host}}``.  The builder is the named
    ``build_host``, else the member with the oldest glibc (what it links against runs on the others),
    the first by name among equals.
    """
    classes: Dict[str, List[str]] = {}
    for name in sorted(hosts):
        if hosts[name]["build_id"] and not hosts[name]["has_release"]:
            classes.setdefault(hosts[name]["build_id"], []).append(name)
    chosen = {}
    for build, names in classes.items():
        named = [hosts[name]["build_host"] for name in names if hosts[name]["build_host"]]
        chosen[build] = named[0] if named else min(names, key=lambda name: (glibc_key(hosts[name]["glibc"]), name))
    return chosen


def glibc_key(version: str) -> List[int]:
    """``"2.36"`` as ``[2, 36]``; an unknown version sorts last."""
    parts = version.split(".")
    return [int(part) for part in parts] if version and all(part.isdigit() for part in parts) else [999]
