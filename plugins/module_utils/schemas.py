# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""JSON Schemas of the files that the product writes.  Literals only; ``docs/schema/*.json`` are made from them.

Only the keywords that ``schema.py`` knows may be used, so that a managed host without any library
validates exactly what the published schema says.
"""

from __future__ import annotations

from typing import Any, Dict

from ansible_collections.dflash.fleet.plugins.module_utils.vocabulary import (
    CHECK_LEVELS,
    CHECK_STAGES,
    CHECK_STATUSES,
    HOST_STATES,
    RUN_STATES,
)

HEX = {"type": "string", "pattern": "^[0-9a-f]+$"}
COMMIT = {"type": "string", "pattern": "^[0-9a-f]{40}$"}
SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
TEXT = {"type": "string"}
ID = {"type": "string", "pattern": "^([0-9a-f]{16})?$"}
SERIES = {
    "type": "array",
    "items": {"type": "object", "required": ["name", "sha256"], "properties": {"name": TEXT, "sha256": SHA256}},
}

CHECK: Dict[str, Any] = {
    "type": "object",
    "required": ["id", "level", "stage", "status", "expected", "actual", "hint", "evidence"],
    "properties": {
        "id": {"type": "string", "pattern": "^[a-z_]+\\.[a-z0-9_.]+(:.+)?$"},
        "level": {"enum": list(CHECK_LEVELS)},
        "stage": {"enum": list(CHECK_STAGES)},
        "status": {"enum": list(CHECK_STATUSES)},
        "hint": TEXT,
        "covered_by": TEXT,
    },
}
CHECKS = {"type": "array", "items": CHECK}

LOCK: Dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "lock: which commit each ref of a repository meant when it was first resolved",
    "type": "object",
    "required": ["schema", "pins"],
    "properties": {
        "schema": {"enum": [1]},
        "pins": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["repo", "ref", "commit", "resolved_at"],
                "properties": {"repo": TEXT, "ref": TEXT, "commit": COMMIT, "resolved_at": TEXT},
            },
        },
    },
}

BUILD_MANIFEST: Dict[str, Any] = {
    "type": "object",
    "required": ["schema", "kind", "build_id", "pin", "series", "commit", "mode", "device", "python", "python_tag",
                 "platform", "wheel", "version", "package_version", "extensions", "requirements_sha256"],
    "properties": {
        "schema": {"enum": [1]}, "kind": {"enum": ["build"]}, "build_id": ID, "pin": COMMIT, "series": SERIES,
        "commit": COMMIT, "mode": TEXT, "device": {"enum": ["cpu", "cuda"]}, "python": TEXT, "python_tag": TEXT,
        "platform": TEXT, "version": TEXT, "package_version": TEXT, "requirements_sha256": SHA256,
        "native": {
            "type": ["object", "null"], "required": ["base", "commit", "count", "files", "says"],
            "properties": {"base": TEXT, "commit": COMMIT, "count": {"type": "integer"}, "says": TEXT,
                           "files": {"type": "array", "items": TEXT}},
        },
        "requires_commits": {
            "type": "array",
            "items": {"type": "object", "required": ["ref", "commit"], "properties": {"ref": TEXT, "commit": COMMIT}},
        },
        "wheel": {
            "type": "object", "required": ["name", "sha256", "size"],
            "properties": {"name": TEXT, "sha256": SHA256, "size": {"type": "integer"}},
        },
        "extensions": {
            "type": "array",
            "items": {"type": "object", "required": ["module", "path", "required"],
                      "properties": {"module": TEXT, "path": TEXT, "required": {"type": "boolean"}}},
        },
    },
}

LAYER_MANIFEST: Dict[str, Any] = {
    "type": "object",
    "required": ["schema", "kind", "layer_id", "python", "requirements_sha256", "distributions", "installed_at"],
    "properties": {
        "schema": {"enum": [1]}, "kind": {"enum": ["layer"]}, "layer_id": ID, "python": TEXT,
        "requirements_sha256": SHA256, "installed_at": TEXT,
        "distributions": {"type": "array", "items": {"type": "object", "required": ["name", "version"]}},
    },
}

RELEASE_MANIFEST: Dict[str, Any] = {
    "type": "object",
    "required": ["schema", "kind", "release_id", "build_id", "layer_id", "requirements_spec", "wheel_sha256",
                 "commit", "version", "installed_at"],
    "properties": {
        "schema": {"enum": [1]}, "kind": {"enum": ["release"]}, "release_id": ID, "build_id": ID, "layer_id": ID,
        "requirements_spec": ID, "wheel_sha256": SHA256, "commit": COMMIT, "version": TEXT, "installed_at": TEXT,
    },
}

MANIFEST: Dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "manifest: written last, so that what it describes is whole",
    "oneOf": [BUILD_MANIFEST, LAYER_MANIFEST, RELEASE_MANIFEST],
}

PROOF: Dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "proof: what was found of one deployment on one host, and what it binds to",
    "type": "object",
    "required": ["schema", "ok", "checks", "binds", "judged", "acceptance", "proven_at"],
    "properties": {
        "schema": {"enum": [1]},
        "ok": {"type": "boolean"},
        "checks": CHECKS,
        "binds": {
            "type": "object",
            "required": ["release_id", "deployment_id", "machine_id", "driver", "gpus"],
            "properties": {"release_id": ID, "deployment_id": ID, "machine_id": TEXT, "driver": TEXT,
                           "gpus": {"type": "array", "items": TEXT}},
        },
        "judged": {"type": "string"},
        "checks_version": {"type": "string"},
        "acceptance": {"type": "object"},
        "accepted_unknown": {"type": "array", "items": TEXT},
        "proven_at": TEXT,
    },
}

VERDICT: Dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "verdict: what one run left on every host",
    "type": "object",
    "required": ["schema", "state", "changed", "hosts"],
    "properties": {
        "schema": {"enum": [1]},
        "state": {"enum": list(RUN_STATES)},
        "changed": {"type": "integer"},
        "check_mode": {"type": "boolean"},
        "started_at": TEXT,
        "finished_at": TEXT,
        "hosts": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["state", "build_id", "release_id", "deployment_id", "pin", "series", "commit",
                             "acceptance_length", "per_position", "checks"],
                "properties": {
                    "state": {"enum": list(HOST_STATES)},
                    "build_id": ID, "release_id": ID, "deployment_id": ID,
                    "pin": {"type": "string", "pattern": "^([0-9a-f]{40})?$"},
                    "commit": {"type": "string", "pattern": "^([0-9a-f]{40})?$"},
                    "series": SERIES,
                    "acceptance_length": {"type": ["number", "null"]},
                    "per_position": {"type": "array", "items": {"type": "number"}},
                    "checks": CHECKS,
                    "reason": TEXT,
                    "fix": TEXT,
                    "notes": {"type": "array", "items": TEXT},
                    "causes": {"type": "array", "items": TEXT},
                },
            },
        },
    },
}

SCHEMAS: Dict[str, Dict[str, Any]] = {"lock": LOCK, "manifest": MANIFEST, "proof": PROOF, "verdict": VERDICT}
