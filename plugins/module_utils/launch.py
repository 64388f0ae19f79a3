# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a server is started with, rendered from typed variables: equal input, equal text, no secret in it.

``serve.yaml`` is read by ``vllm serve --config``; ``argv.json`` is read by ``launcher.py``.  Their
texts are part of the deployment id, so whatever changes them makes a new deployment.  Of the API
key they hold the path of its file.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import speculation
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.launcher import DEPLOYMENT
from ansible_collections.dflash.fleet.plugins.module_utils.process import MARKER

#: vLLM puts sockets of up to 37 characters below its base; a socket path holds 107.
SOCKET_BASE_MAX = 70
INSTANCE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}\Z")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
KEY = re.compile(r"[a-z0-9][a-z0-9-]*\Z")

#: Engine arguments that other variables set, and the variable that does.
OWNED_ARGUMENTS = {
    "model": "dflash_models_target", "config": "dflash_serve_engine_args", "host": "dflash_serve_host",
    "port": "dflash_serve_port", "served-model-name": "dflash_serve_served_model_name",
    "speculative-config": "dflash_serve_speculative_config", "spec-method": "dflash_serve_speculative_config",
    "spec-model": "dflash_models_drafter", "spec-tokens": "dflash_serve_num_speculative_tokens",
    "api-key": "dflash_serve_api_key_file", "trust-remote-code": "dflash_serve_trust_remote_code",
    "uds": "dflash_serve_host",
}
OWNED_SPECULATION = {
    "method": "(always dflash)", "model": "dflash_models_drafter",
    "num_speculative_tokens": "dflash_serve_num_speculative_tokens",
}
OWNED_ENVIRONMENT = (
    MARKER, "PATH", "HOME", "TMPDIR", "VLLM_RPC_BASE_PATH", "VLLM_CACHE_ROOT", "PYTHONPATH", "PYTHONHOME",
    "VIRTUAL_ENV",
)
SECRET_NAME = re.compile(r"(^|_)(TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
#: What a machine without GPU needs; dflash_serve_engine_args and dflash_serve_environment override it.
DEVICE_ARGUMENTS: Dict[str, Dict[str, Any]] = {
    "cpu": {"enforce-eager": True, "generation-config": "vllm", "max-num-seqs": 4},
    "cuda": {},
}
DEVICE_ENVIRONMENT: Dict[str, Dict[str, str]] = {"cpu": {"VLLM_CPU_KVCACHE_SPACE": "1"}, "cuda": {}}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def instance_dir(root: str, instance: str) -> str:
    """The folder of an instance.  Raises ``DflashError`` for a name that is no folder name."""
    if not INSTANCE_NAME.match(instance):
        raise DflashError(
            "The instance name %r is not usable as a folder name" % instance, "dflash_instances",
            "Use at most 32 of a-z, 0-9, dot, dash and underscore.",
        )
    return os.path.join(root, "instances", instance)


def run_dir(root: str, instance: str) -> str:
    """The folder of sockets and the working folder of the server, emptied before each start."""
    path = os.path.join(instance_dir(root, instance), "run")
    if len(path.encode()) > SOCKET_BASE_MAX:
        raise DflashError(
            "The folder for sockets has %d characters; %d are the most" % (len(path.encode()), SOCKET_BASE_MAX),
            path, "Choose a shorter dflash_root or instance name.",
        )
    return path


def log_path(root: str, instance: str) -> str:
    """The log of an instance's servers; it spans processes."""
    return os.path.join(root, "log", "%s.log" % instance)


def env_file(root: str, instance: str) -> str:
    """The file of secrets (0600, the service account's) that the launcher loads."""
    return os.path.join(root, "etc", "%s.env" % instance)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int) -> str:
    """The address under which a server on this machine is asked, also when it is bound to every address."""
    plain = host.strip("[]")
    if plain in ("0.0.0.0", ""):
        plain = "127.0.0.1"
    elif plain == "::":
        plain = "::1"
    return "http://%s:%d" % ("[%s]" % plain if ":" in plain else plain, port)


def scalar(value: Any, where: str) -> str:
    """A YAML scalar that reads back as the same value under YAML 1.1 and 1.2."""
    if value is None or isinstance(value, (bool, int)):
        return json.dumps(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DflashError("%r cannot be written to a configuration" % value, where, "Give a finite number.")
        text = repr(value)
        # YAML 1.1 takes 1e-05 for a string: the mantissa needs its dot.
        return text if "." in text or "e" not in text else text.replace("e", ".0e", 1)
    if isinstance(value, str):
        return json.dumps(value)
    raise DflashError("A %s cannot be written to a configuration" % type(value).__name__, where, "Give plain values.")


def to_yaml(value: Mapping[str, Any], where: str, indent: int = 0) -> str:
    """Block YAML of nested mappings, lists and scalars; keys sorted, no library needed."""
    lines: List[str] = []
    pad = "  " * indent
    for key in sorted(value):
        item = value[key]
        name = key if re.match(r"[A-Za-z_][A-Za-z0-9_-]*\Z", key) and key.lower() not in YAML_WORDS else json.dumps(key)
        place = "%s.%s" % (where, key)
        if isinstance(item, Mapping):
            if item:
                lines.append("%s%s:" % (pad, name))
                lines.append(to_yaml(item, place, indent + 1).rstrip("\n"))
            else:
                lines.append("%s%s: {}" % (pad, name))
        elif isinstance(item, (list, tuple)):
            lines.append("%s%s: %s" % (pad, name, _flow(item, place)))
        else:
            lines.append("%s%s: %s" % (pad, name, scalar(item, place)))
    return "\n".join(lines) + "\n"


YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def _flow(value: Any, where: str) -> str:
    if isinstance(value, (list, tuple)):
        return "[%s]" % ", ".join(_flow(item, where) for item in value)
    if isinstance(value, Mapping):
        return "{%s}" % ", ".join("%s: %s" % (json.dumps(str(k)), _flow(value[k], where)) for k in sorted(value))
    return scalar(value, where)


def _engine_arguments(given: Mapping[str, Any], device: str) -> Dict[str, Any]:
    """Engine arguments by their option's name; false becomes the negated option, null is left out."""
    out: Dict[str, Any] = dict(DEVICE_ARGUMENTS[device])
    seen: Dict[str, str] = {}
    for raw in sorted(given):
        value = given[raw]
        key = str(raw).lstrip("-").replace("_", "-")
        where = "dflash_serve_engine_args.%s" % raw
        if key.split(".")[0] in OWNED_ARGUMENTS:
            owner = OWNED_ARGUMENTS[key.split(".")[0]]
            raise DflashError("%s is not an engine argument of this collection" % raw, where, "Set %s." % owner)
        if not KEY.match(key):
            raise DflashError(
                "%s is no option of vllm serve" % raw, where, "Give nested settings as a mapping, not dotted.",
            )
        if key in seen:
            raise DflashError("%s and %s are the same option" % (seen[key], raw), where, "Keep one.")
        seen[key] = str(raw)
        opposite = key[3:] if key.startswith("no-") else "no-" + key
        out.pop(opposite, None)
        if value is None:
            out.pop(key, None)
        elif value is False:
            out.pop(key, None)
            out[opposite] = True
        else:
            out[key] = value
    if out.get("disable-log-stats") or out.get("no-log-stats"):
        raise DflashError(
            "disable-log-stats hides the counters that prove the drafter works", "dflash_serve_engine_args",
            "Remove it.",
        )
    return out


def _budget(arguments: Mapping[str, Any], k: int) -> None:
    """vLLM dies at start, or worse under load, when a full batch of drafts does not fit into one step."""
    sequences, tokens = arguments.get("max-num-seqs"), arguments.get("max-num-batched-tokens")
    if isinstance(sequences, int) and isinstance(tokens, int) and sequences * (k + 1) > tokens:
        raise DflashError(
            "max-num-seqs %d x (num_speculative_tokens %d + 1) = %d exceeds max-num-batched-tokens %d"
            % (sequences, k, sequences * (k + 1), tokens), "dflash_serve_engine_args",
            "Raise max-num-batched-tokens to %d, or lower one of the others." % (sequences * (k + 1)),
        )


def _environment(
    inputs: Mapping[str, Any], root: str, instance: str, release_dir: str, layer_dir: str, runner: Optional[str],
) -> Dict[str, str]:
    run = run_dir(root, instance)
    cache = os.path.join(root, "cache", os.path.basename(release_dir.rstrip("/")))
    out = {
        MARKER: instance_dir(root, instance),
        "PATH": "%s/venv/bin:%s/venv/bin:%s" % (release_dir, layer_dir, SYSTEM_PATH),
        "HOME": cache, "LANG": "C.UTF-8", "TMPDIR": run, "VLLM_RPC_BASE_PATH": run,
        "VLLM_CACHE_ROOT": cache + "/vllm", "VLLM_CONFIG_ROOT": cache + "/config", "XDG_CACHE_HOME": cache + "/xdg",
        "TRITON_CACHE_DIR": cache + "/triton", "TORCHINDUCTOR_CACHE_DIR": cache + "/inductor",
        "CUDA_CACHE_PATH": cache + "/cuda", "FLASHINFER_WORKSPACE_BASE": cache, "HF_HOME": cache + "/huggingface",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
    }
    timeout = inputs.get("dflash_serve_ready_timeout")
    if timeout:
        out["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(timeout))
    if runner == "v2":
        out["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    out.update(DEVICE_ENVIRONMENT[str(inputs["vllm_build_device"])])
    given = inputs.get("dflash_serve_environment") or {}
    for name in sorted(given):
        where = "dflash_serve_environment.%s" % name
        if not VARIABLE_NAME.match(str(name)):
            raise DflashError("%r is no name of an environment variable" % name, where, "Use letters, digits and _.")
        if name in OWNED_ENVIRONMENT:
            raise DflashError("%s is set by this collection" % name, where, "Remove it.")
        if SECRET_NAME.search(str(name)):
            raise DflashError(
                "%s looks like a secret, and this variable ends in readable files" % name, where,
                "Put the API key into a file and name it in dflash_serve_api_key_file.",
            )
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "\0" in str(value):
            raise DflashError("The value of %s is not text" % name, where, "Quote it.")
        out[str(name)] = str(value)
    return out


def _speculation(given: Mapping[str, Any], drafter_dir: str, k: int) -> Dict[str, Any]:
    for key in sorted(given):
        if key in OWNED_SPECULATION:
            raise DflashError(
                "%s cannot be set here" % key, "dflash_serve_speculative_config.%s" % key,
                "Set %s." % OWNED_SPECULATION[key],
            )
    untrue = speculation.lossy(given)
    if untrue:
        raise DflashError(
            "%s would make acceptance mean nothing: %s" % untrue,
            "dflash_serve_speculative_config.%s" % untrue[0],
            "Remove it: only verification that keeps the target's text can be proven.",
        )
    if k < 1:
        raise DflashError(
            "%d speculative tokens are none" % k, "dflash_serve_num_speculative_tokens",
            "Give 1 or more, or 0 for the default.",
        )
    out = {key: given[key] for key in given if given[key] is not None}
    out.update({"method": "dflash", "model": drafter_dir, "num_speculative_tokens": k})
    return out


def _address(inputs: Mapping[str, Any]) -> Tuple[str, int]:
    host, port = str(inputs.get("dflash_serve_host") or "127.0.0.1"), inputs.get("dflash_serve_port")
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise DflashError("%r is no TCP port" % (port,), "dflash_serve_port", "Give a number from 1 to 65535.")
    guarded = inputs.get("dflash_serve_api_key_file") or inputs.get("dflash_serve_allow_open_address")
    if not guarded and not is_loopback(host):
        raise DflashError(
            "The server would answer anybody on %s, without an API key" % host, "dflash_serve_host",
            "Name a file in dflash_serve_api_key_file, or keep 127.0.0.1 behind a proxy, "
            "or set dflash_serve_allow_open_address: true.",
        )
    return host, port


def render(
    inputs: Mapping[str, Any], *, root: str, instance: str, release_dir: str, layer_dir: str, target_dir: str,
    drafter_dir: Optional[str], k: int, served_name: str, runner: Optional[str] = None,
) -> Dict[str, str]:
    """The texts of ``serve.yaml`` and ``argv.json``.

    ``k`` is the final number of speculative tokens (``pairing.examine`` gives the default);
    ``drafter_dir`` None serves without drafter.  ``runner`` v2 asks releases for it whose default
    is another.  All folders are absolute.  Raises ``DflashError`` for what must not be served.
    """
    device = str(inputs.get("vllm_build_device") or "cuda")
    if device not in DEVICE_ARGUMENTS:
        raise DflashError("%s is no device that can serve" % device, "vllm_build_device", "Use cuda or cpu.")
    host, port = _address(inputs)
    serve = _engine_arguments(inputs.get("dflash_serve_engine_args") or {}, device)
    serve.update({"model": target_dir, "served-model-name": served_name, "host": host, "port": port})
    if inputs.get("dflash_serve_trust_remote_code"):
        serve["trust-remote-code"] = True
    if drafter_dir:
        serve["speculative-config"] = _speculation(
            inputs.get("dflash_serve_speculative_config") or {}, drafter_dir, k,
        )
        _budget(serve, k)
    argv = {
        "schema": 1,
        "argv": ["%s/venv/bin/vllm" % release_dir, "serve", "--config", DEPLOYMENT + "/serve.yaml"],
        "env": _environment(dict(inputs, vllm_build_device=device), root, instance, release_dir, layer_dir, runner),
        "cwd": run_dir(root, instance),
        "env_file": env_file(root, instance),
        "release": release_dir,
        "served_name": served_name,
        "base_url": base_url(host, port),
        "port": port,
    }
    if inputs.get("dflash_serve_api_key_file"):
        argv["api_key_file"] = str(inputs["dflash_serve_api_key_file"])  # its path; the key is read at each start
    return {
        "serve.yaml": to_yaml(serve, "serve.yaml"),
        "argv.json": json.dumps(argv, indent=2, sort_keys=True) + "\n",
    }
