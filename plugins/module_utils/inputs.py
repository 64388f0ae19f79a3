# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs: every variable typed once, unknown names answered, impossible combinations refused.

Pure logic over plain values; the action plugin ``dflash_inputs`` reads declarations and variables.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import vocabulary
from ansible_collections.dflash.fleet.plugins.module_utils.checks import base_id

Option = Mapping[str, Any]

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

#: Shared variables begin with dflash_ but with no role's name (design: roles begin theirs with the role's name).
PREFIXES = ("dflash_", "vllm_")

#: Least and greatest value, where a type alone is too wide.
RANGES: Dict[str, Tuple[float, float]] = {
    "dflash_serve_port": (1, 65535),
    "dflash_serve_num_speculative_tokens": (0, 255),
    "dflash_serve_ready_timeout": (10, 86400),
    "dflash_serve_stop_timeout": (1, 3600),
    "dflash_accept_floor": (1.0, 256.0),
    "dflash_accept_canary_floor": (1.0, 256.0),
    "dflash_accept_min_drafts": (1, 1000000),
    "dflash_accept_canary_min_drafts": (1, 1000000),
    "dflash_accept_budget": (1, 86400),
    "vllm_build_timeout": (60, 604800),
    "vllm_build_poll": (1, 600),
    "vllm_release_timeout": (60, 86400),
    "vllm_verify_deadline": (5, 3600),
    "dflash_preflight_disk_gib": (0.0, 100000.0),
    "dflash_preflight_memory_gib": (0.0, 100000.0),
}

#: Keys of the dictionaries that describe a model or a canary pair.
KEYS: Dict[str, Tuple[str, ...]] = {
    "dflash_models_target": ("path", "source", "name"),
    "dflash_models_drafter": ("path", "source", "name"),
    "dflash_models_canary": ("target", "drafter", "items"),
}

#: What an instance may override.
INSTANCE_PREFIXES = ("dflash_models_", "dflash_serve_", "dflash_accept_")


def distance(left: str, right: str) -> int:
    """Levenshtein distance, where a swap of neighbours counts as one (optimal string alignment)."""
    rows = [list(range(len(right) + 1))]
    for i, a in enumerate(left, 1):
        row = [i]
        for j, b in enumerate(right, 1):
            best = min(row[-1] + 1, rows[-1][j] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar known name, or an empty string when none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, 0.6)), "")


def unknown_names(
    names: Iterable[str], declared: Iterable[str], roles: Sequence[str], allowed: Iterable[str] = ()
) -> Tuple[List[str], List[str]]:
    """Sentences for names that no role declares: ``(errors, warnings)``.

    An error inside a role's own prefix or within edit distance 2 of a declared name; a warning for
    other names that begin with ``dflash_`` or ``vllm_`` (other people's roles own some of those).
    """
    known, accepted = set(declared), set(allowed)
    errors: List[str] = []
    warnings: List[str] = []
    for name in sorted(set(names) - known - accepted):
        if name.startswith("_"):
            continue
        ours = any(name.startswith(role + "_") for role in roles)
        # Lengths that differ by more than 2 cannot be near; a play has hundreds of names.
        near = [(distance(name, other), other) for other in known if abs(len(name) - len(other)) <= 2]
        close = min((pair for pair in near if pair[0] <= 2), default=(0, ""))[1]
        if ours or close:
            guess = close or nearest(name, sorted(known))
            text = "unknown variable %s" % name
            if guess:
                text += ": did you mean %s?" % guess
            errors.append(text + " (others' variables are named in dflash_allow_unknown_vars)")
        elif name.startswith(PREFIXES):
            warnings.append("variable %s is not one of dflash.fleet; it has no effect here" % name)
    return errors, warnings


def _wrong(name: str, want: str, value: Any) -> ValueError:
    return ValueError("%s must be %s, not %s %r" % (name, want, type(value).__name__, value))


def _parsed(value: Any, whole: bool) -> Any:
    """A number, exact where it is whole; ``"8000.0"`` is whole too."""
    if whole and not isinstance(value, float):
        try:
            return int(value)
        except ValueError:
            pass
    return float(value)


def _number(name: str, value: Any, whole: bool) -> Any:
    want = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _wrong(name, want, value)
    try:
        number = _parsed(value, whole)
        fits = number == number and (not whole or number == int(number))
    except (ValueError, OverflowError):
        fits = False
    if not fits:
        raise _wrong(name, want, value)
    low, high = RANGES.get(name, (float("-inf"), float("inf")))
    if not low <= number <= high:
        raise ValueError("%s must be between %s and %s, not %s" % (name, low, high, value))
    return int(number) if whole else number


def _structure(name: str, value: Any, want: type) -> Any:
    """A list or dict as it is, or from JSON text; a list also from comma-separated text."""
    word = "a list" if want is list else "a mapping"
    if isinstance(value, want):
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[" if want is list else "{"):
            try:
                parsed = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError("%s must be %s; its JSON is broken: %s" % (name, word, error)) from None
            if isinstance(parsed, want):
                return parsed
        elif want is list:
            return [part.strip() for part in text.split(",") if part.strip()]
    raise _wrong(name, word, value)


def coerce(name: str, option: Option, value: Any) -> Any:
    """``value`` as the declared type.  Raises ``ValueError`` with one sentence that names the variable."""
    kind = option["type"]
    if kind in ("str", "path"):
        if isinstance(value, (dict, list, bool)) or value is None:
            raise _wrong(name, "text", value)
        value = str(value)
        if kind == "path" and not os.path.isabs(value):
            raise ValueError("%s must be an absolute path, not %r" % (name, value))
        if "\n" in value or "\x00" in value:
            raise ValueError("%s must be one line of text" % name)
    elif kind == "bool":
        word = str(value).strip().lower()
        if not isinstance(value, bool) and word not in TRUE + FALSE:
            raise _wrong(name, "true or false", value)
        value = value if isinstance(value, bool) else word in TRUE
    elif kind in ("int", "float"):
        value = _number(name, value, kind == "int")
    elif kind == "list":
        value = list(_structure(name, value, list))
        if option.get("elements") == "str":
            for item in value:
                if not isinstance(item, str):
                    raise _wrong("every item of " + name, "text", item)
                if re.search(r"[\x00-\x1f\x7f]", item):
                    raise ValueError("every item of %s must be one line of text, not %r" % (name, item))
    elif kind == "dict":
        value = dict(_structure(name, value, dict))
        if name in KEYS:
            for key in value:
                if key not in KEYS[name]:
                    guess = nearest(key, KEYS[name])
                    raise ValueError(
                        "%s has no key %s%s"
                        % (
                            name,
                            key,
                            ": did you mean %s?" % guess if guess else "; its keys are " + ", ".join(KEYS[name]),
                        )
                    )
                if not isinstance(value[key], str):
                    raise _wrong("%s.%s" % (name, key), "text", value[key])
    if "choices" in option and value not in option["choices"]:
        guess = nearest(str(value), option["choices"])
        raise ValueError(
            "%s must be one of %s, not %r%s"
            % (name, ", ".join(option["choices"]), value, ": did you mean %s?" % guess if guess else "")
        )
    return value


def apply_instance(values: Dict[str, Any], declared: Mapping[str, Option]) -> Tuple[Dict[str, Any], str, List[str]]:
    """Overlay the one instance's overrides: ``(values, instance name, errors)``."""
    instances = values["dflash_instances"]
    if len(instances) != 1:
        return values, "", ["dflash_instances must name exactly one instance in this version, not %d" % len(instances)]
    name, overrides = next(iter(instances.items()))
    errors: List[str] = []
    if not re.match(r"^[a-z0-9][a-z0-9_-]{0,15}\Z", name):
        errors.append("instance name %r must be at most 16 of a-z, 0-9, - and _" % name)
    if not isinstance(overrides, dict):
        return values, name, errors + ["dflash_instances.%s must be a mapping of variables" % name]
    merged = dict(values)
    allowed = [known for known in declared if known.startswith(INSTANCE_PREFIXES)]
    for key, value in overrides.items():
        if key not in allowed:
            guess = nearest(key, allowed)
            errors.append(
                "dflash_instances.%s has an unknown variable %s%s"
                % (name, key, ": did you mean %s?" % guess if guess else "")
            )
            continue
        try:
            merged[key] = coerce(key, declared[key], value)
        except ValueError as error:
            errors.append("dflash_instances.%s: %s" % (name, error))
    return merged, name, errors


def combinations(values: Mapping[str, Any]) -> List[str]:
    """Sentences for values that are right alone and wrong together."""
    errors: List[str] = []
    if values["vllm_build_mode"] == "source":
        errors.append(
            "vllm_build_mode source is not available in this version: set precompiled, with "
            "vllm_build_precompiled_wheel and vllm_build_precompiled_base"
        )
    elif values["vllm_build_device"] != "cpu":
        errors.append(
            "vllm_build_mode precompiled works for vllm_build_device cpu in this version, not %s"
            % values["vllm_build_device"]
        )
    else:
        wheel = values["vllm_build_precompiled_wheel"]
        if wheel and not re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*\Z", wheel):
            errors.append("vllm_build_precompiled_wheel must be name==version, not %r" % wheel)
        for name in ("vllm_build_precompiled_wheel", "vllm_build_precompiled_base"):
            if not values[name]:
                errors.append("%s is required when vllm_build_mode is precompiled" % name)
    for role in ("target", "drafter"):
        name = "dflash_models_" + role
        if not values[name].get("path"):
            errors.append("%s is required: a mapping with the path of a model folder" % name)
        if values[name].get("source", "controller") not in ("controller", "host"):
            errors.append("%s.source must be controller or host, not %r" % (name, values[name]["source"]))
    canary = values["dflash_models_canary"]
    if canary and set(canary) != set(KEYS["dflash_models_canary"]):
        errors.append("dflash_models_canary needs all of %s" % ", ".join(KEYS["dflash_models_canary"]))
    if not re.match(r"(/[A-Za-z0-9_.-]+){2,}\Z", values["dflash_root"]) or ".." in values["dflash_root"].split("/"):
        errors.append("dflash_root must be a folder of its own, at least two levels deep, of letters, digits, dot, "
                      "dash and underscore, such as /opt/dflash; not %r" % values["dflash_root"])
    if len(values["dflash_root"]) > 40:
        errors.append(
            "dflash_root is %d characters long, at most 40 fit into socket paths" % len(values["dflash_root"])
        )
    for name in ("vllm_source_repo", "vllm_source_ref", "vllm_toolchain_python", "dflash_service_user"):
        if not values[name].strip() or values[name].startswith("-"):
            errors.append("%s must not be empty or begin with a dash" % name)
    for check in values["dflash_accept_unknown"]:
        if base_id(check) not in vocabulary.CHECKS:
            guess = nearest(base_id(check), vocabulary.CHECKS)
            errors.append("dflash_accept_unknown has %s, which is no check id%s" % (
                check, ": did you mean %s?" % guess if guess else "; docs/checks.md lists them"))
    for name, value in values["dflash_serve_environment"].items():
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            errors.append("dflash_serve_environment.%s must be text, not %r" % (name, value))
    errors += required_commits(values["vllm_source_requires_commits"])
    for step in values["dflash_rollout_serial"]:
        if not re.match(r"0*[1-9][0-9]*%?\Z", str(step)):
            errors.append("dflash_rollout_serial has %r; its items are counts or percentages above 0" % (step,))
    return errors


def notes(values: Mapping[str, Any], declared: Mapping[str, Option]) -> List[str]:
    """What the operator took upon himself, one line each: lowered floors, accepted unknowns, an open address."""
    out = []
    for name in ("dflash_accept_floor", "dflash_accept_min_drafts", "dflash_accept_canary_floor",
                 "dflash_accept_canary_min_drafts"):
        if values[name] < declared[name]["default"]:
            out.append("%s is lowered to %s (default %s)" % (name, values[name], declared[name]["default"]))
    if values["dflash_accept_unknown"]:
        out.append("unknown is accepted for %s" % ", ".join(values["dflash_accept_unknown"]))
    if values["dflash_serve_allow_open_address"] and not values["dflash_serve_api_key_file"]:
        out.append("dflash_serve_allow_open_address: anybody who reaches the port is answered")
    return out


def required_commits(names: Iterable[str]) -> List[str]:
    """Sentences for names that can name no commit; what the repository knows is found out by the build."""
    return [
        "vllm_source_requires_commits has %r; its items are commits (7 to 40 digits), tags, branches or refs" % name
        for name in names
        if not re.match(r"^(?!-)(?!.*\.\.)[\w./+-]+$", name)
    ]


#: What a diagnosis needs; it asks for no model and no build.
VERIFY = (
    "vllm_verify_python", "vllm_verify_tree", "vllm_verify_drafter", "vllm_verify_deadline", "dflash_root",
    "dflash_instances", "dflash_become", "dflash_service_user", "dflash_accept_unknown", "dflash_allow_unknown_vars",
    "dflash_serve_speculative_config", "dflash_report_dir",
)


def verify(values: Mapping[str, Any]) -> List[str]:
    """Sentences for values of a diagnosis that are right alone and wrong together."""
    errors = [
        "%s must be an absolute path on the host, not %r" % (name, values[name])
        for name in ("vllm_verify_python", "vllm_verify_tree", "vllm_verify_drafter")
        if values[name] and not values[name].startswith(("/", "~"))
    ]
    if values["vllm_verify_python"] and values["vllm_verify_tree"]:
        errors.append("vllm_verify_python and vllm_verify_tree are both set: name one of them")
    if values["dflash_service_user"].startswith("-") or not values["dflash_service_user"].strip():
        errors.append("dflash_service_user must not be empty or begin with a dash")
    return errors


def merge(declared: Mapping[str, Option], given: Mapping[str, Any]) -> Tuple[Dict[str, Any], List[str]]:
    """Declared defaults overlaid with given values, each coerced: ``(values, errors)``."""
    values: Dict[str, Any] = {}
    errors: List[str] = []
    for name, option in declared.items():
        try:
            values[name] = coerce(name, option, given[name] if name in given else option["default"])
        except ValueError as error:
            errors.append(str(error))
            values[name] = option["default"]
    return values, errors
