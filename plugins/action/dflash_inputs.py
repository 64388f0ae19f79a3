# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Runs on the controller, per host, without a connection: types all inputs once."""

from __future__ import annotations

import glob
import json
import os
import time
from typing import Any, Dict

from ansible import constants, context
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

from ansible_collections.dflash.fleet.plugins.module_utils import host, inputs, models, process
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json, short_hash, write_json

COLLECTION = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def plain(value: Any) -> Any:
    """The value without Ansible's tags, so that json and yaml treat it as what it is."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


class ActionModule(ActionBase):
    """See the module of the same name for the documentation."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _declared: Dict[str, Any] = {}
    _roles: list = []

    def run(self, tmp: Any = None, task_vars: Any = None) -> Dict[str, Any]:
        """Return typed inputs, or fail with every sentence at once."""
        task_vars = task_vars or {}
        result = super().run(tmp, task_vars)
        try:
            diagnosis = self._task.args.get("scope", "deploy") == "verify"
            result.update(self._diagnosis(task_vars) if diagnosis else self._inputs(task_vars))
        except DflashError as error:
            result.update(failed=True, msg=str(error), errors=[str(error)])
        return result

    def _declarations(self) -> Dict[str, Any]:
        if not ActionModule._declared:
            for path in sorted(glob.glob(os.path.join(COLLECTION, "roles", "*", "meta", "argument_specs.yml"))):
                spec = plain(self._loader.load_from_file(path))
                ActionModule._declared.update(spec["argument_specs"]["main"].get("options") or {})
                ActionModule._roles.append(path.split(os.sep)[-3])
        return ActionModule._declared

    def _given(self, names: Any, task_vars: Dict[str, Any]) -> Dict[str, Any]:
        given = {}
        for name in names:
            if name in task_vars:
                try:
                    given[name] = plain(self._templar.template(task_vars[name]))
                except AnsibleError as error:
                    raise DflashError("%s cannot be evaluated: %s" % (name, str(error).splitlines()[0])) from error
        return given

    def _inputs(self, task_vars: Dict[str, Any]) -> Dict[str, Any]:
        declared = self._declarations()
        given = self._given(declared, task_vars)
        values, errors = inputs.merge(declared, given)
        bad, warnings = inputs.unknown_names(
            [str(name) for name in task_vars], declared, ActionModule._roles, values["dflash_allow_unknown_vars"]
        )
        values, instance, more = inputs.apply_instance(values, declared)
        errors += bad + more
        if not errors:
            errors += inputs.combinations(values)
        if errors:
            return {"failed": True, "msg": "; ".join(errors), "errors": errors, "warnings": warnings}
        base = self._base(task_vars)
        series = [os.path.join(base, path) for path in values["vllm_source_series"]]
        state = self._state_folder(base)
        target = self._model(values["dflash_models_target"], base, state)
        drafter = self._model(values["dflash_models_drafter"], base, state)
        canary = self._canary(values, drafter, base, state)
        prompts = values["dflash_accept_prompts"]
        return {
            "changed": False,
            "warnings": warnings,
            "inputs": values,
            "instance": instance,
            "series": series,
            "lock_file": os.path.join(base, values["vllm_source_lock_file"])
            if values["vllm_source_lock_file"]
            else os.path.join(state, "dflash.lock.json"),
            "report_dir": os.path.join(base, values["dflash_report_dir"])
            if values["dflash_report_dir"]
            else os.path.join(state, "runs"),
            "target": target,
            "drafter": drafter,
            "canary": canary,
            "started": time.time(),
            # Tasks run in children of the one process that is this run.
            "run": dict(process.identity(os.getppid()) or {}, machine_id=host.machine_id()),
            "notes": inputs.notes(values, declared),
            "prompts": self._items(os.path.join(base, prompts)) if prompts else canary["items"],
            "pair_is_canary": bool(target["revision"])
            and target["revision"] == canary["target"]["revision"]
            and drafter["revision"] == canary["drafter"]["revision"],
        }

    def _diagnosis(self, task_vars: Dict[str, Any]) -> Dict[str, Any]:
        """The few inputs of a diagnosis: no model, no build, and a host that nothing else is known of."""
        declared = self._declarations()
        given = self._given(inputs.VERIFY, task_vars)
        values, errors = inputs.merge({name: declared[name] for name in inputs.VERIFY}, given)
        bad, warnings = inputs.unknown_names(
            [str(name) for name in task_vars], declared, ActionModule._roles, values["dflash_allow_unknown_vars"]
        )
        values, instance, more = inputs.apply_instance(values, declared)
        errors += bad + more + inputs.verify(values)
        base = self._base(task_vars)
        report_dir = os.path.join(base, values["dflash_report_dir"] or "runs")
        if not values["dflash_report_dir"] and not errors:
            report_dir = os.path.join(self._state_folder(base), "runs")
        if errors:
            return {"failed": True, "msg": "; ".join(errors), "errors": errors, "warnings": warnings,
                    "report_dir": report_dir}
        # The account of a deployment is there where one was made; elsewhere every host has this one.
        values["dflash_service_user"] = given.get("dflash_service_user", "nobody")
        return {"changed": False, "warnings": warnings, "inputs": values, "instance": instance,
                "report_dir": report_dir}

    @staticmethod
    def _base(task_vars: Dict[str, Any]) -> str:
        """The folder that relative paths count from: an inventory folder's parent, or an inventory file's folder."""
        folder = str(task_vars.get("inventory_dir") or "")
        if not os.path.isdir(folder):  # "-i host," lies nowhere
            folder = os.getcwd()
        sources = context.CLIARGS.get("inventory") or constants.DEFAULT_HOST_LIST
        given = {os.path.realpath(source) for source in sources if os.path.isdir(source)}
        return os.path.dirname(os.path.realpath(folder)) if os.path.realpath(folder) in given else folder

    @staticmethod
    def _state_folder(base: str) -> str:
        """``base`` where it can be written, else a folder of its own below the XDG state folder."""
        if os.access(base, os.W_OK):
            return base
        home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        folder = os.path.join(home, "dflash", short_hash(base, 12))
        os.makedirs(folder, exist_ok=True)
        return folder

    @staticmethod
    def _items(path: str) -> Any:
        items = read_json(path)
        if not isinstance(items, list) or not items or not all(isinstance(i, dict) and i.get("q") for i in items):
            raise DflashError("not a JSON list of objects with q", path, "see canary/pairs/cpu/items.json for the form")
        return [{"q": str(item["q"]), "a": str(item.get("a", ""))} for item in items]

    def _model(self, model: Dict[str, str], base: str, state: str) -> Dict[str, Any]:
        """A model on the controller is described here; one on the host is described there."""
        if model.get("source") == "host":
            name = model.get("name") or os.path.basename(model["path"].rstrip("/"))
            return {"source": "host", "name": name, "path": model["path"], "revision": "", "config": None, "stat": None}
        path = os.path.join(base, model["path"])
        memory = os.path.join(state, ".cache", "models-%s.json" % short_hash(path, 12))
        described = models.describe(path, model.get("name", ""), read_json(memory))
        if read_json(memory) != described and os.access(state, os.W_OK) and not self._task.check_mode:
            os.makedirs(os.path.dirname(memory), exist_ok=True)
            write_json(memory, described)
        return dict(json.loads(json.dumps(described)), source="controller")

    def _canary(self, values: Dict[str, Any], drafter: Dict[str, Any], base: str, state: str) -> Dict[str, Any]:
        """The shipped pair for this device whose drafter has the layer types of the instance's drafter."""
        own = values["dflash_models_canary"]
        if own:
            paths = {key: os.path.join(base, own[key]) for key in ("target", "drafter", "items")}
        else:
            kinds = set((drafter["config"] or {}).get("layer_types") or ["full_attention"])
            if values["vllm_build_device"] == "cpu":
                folder, name = "cpu", "drafter_sliding" if kinds == {"sliding_attention"} else "drafter_full"
            else:
                folder, name = "gpu", "drafter_mixed"
            pairs = os.path.join(COLLECTION, "canary", "pairs", folder)
            paths = {
                key: os.path.join(pairs, part)
                for key, part in (("target", "target"), ("drafter", name), ("items", "items.json"))
            }
        return {
            "target": self._model({"path": paths["target"], "name": "canary-target"}, base, state),
            "drafter": self._model({"path": paths["drafter"], "name": "canary-drafter"}, base, state),
            "items": self._items(paths["items"]),
        }
