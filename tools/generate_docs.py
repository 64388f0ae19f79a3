# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the reference pages from the data that the code itself reads.

``docs/variables.md`` from the roles' argument specs, ``docs/checks.md`` from the vocabulary,
``docs/schema/*.json`` from the schemas.  With ``--check`` nothing is written; pages that are not
what the data says are named and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "collections"))

from ansible_collections.dflash.fleet.plugins.module_utils import schemas, vocabulary  # noqa: E402

NOTE = "<!-- Made by tools/generate_docs.py; change the data it names and run it again. -->\n"


def inline(text: str) -> str:
    """Ansible's markup as Markdown, on one line and safe in a table cell."""
    text = re.sub(r"[CVOE]\(([^)]*)\)|RV\(([^)]*)\)", lambda m: f"`{m.group(1) or m.group(2)}`", text)
    return " ".join(text.split()).replace("|", "\\|")


def cell(value: Any) -> str:
    """A default as a reader would type it."""
    return f"`{json.dumps(value)}`".replace("|", "\\|")


def kind(option: dict[str, Any]) -> str:
    """Type, element type and choices of an option."""
    text = str(option["type"])
    if "elements" in option:
        text += f" of {option['elements']}"
    if "choices" in option:
        text += ": " + ", ".join(f"`{choice}`" for choice in option["choices"])
    return text


def specs() -> dict[str, dict[str, Any]]:
    """The main argument spec of each role, by the role's name."""
    found = {}
    for path in sorted(REPO.glob("roles/*/meta/argument_specs.yml")):
        found[path.parent.parent.name] = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]
    return found


def variables() -> str:
    """The page of all variables, one table a role."""
    lines = [NOTE, "# Variables", ""]
    lines += [
        "Every variable that the product reads, by role. `dflash_common` holds the shared ones. A name inside a",
        "role's prefix that is not listed here is an error, told before anything is touched.", "",
    ]
    for role, spec in specs().items():
        options = spec.get("options") or {}
        lines += [f"## {role}", "", inline(spec["short_description"]), ""]
        if not options:
            lines += ["No variables.", ""]
            continue
        lines += ["| variable | type | default | meaning |", "|---|---|---|---|"]
        for name, option in options.items():
            text = option["description"]
            text = " ".join(text) if isinstance(text, list) else text
            lines.append(f"| `{name}` | {kind(option)} | {cell(option.get('default'))} | {inline(text)} |")
        lines.append("")
    return "\n".join(lines)


def checks() -> str:
    """The page of states, exit codes and checks."""
    lines = [NOTE, "# States and checks", ""]
    lines += ["The words here are closed lists: recap, verdict and proof use no other.", ""]
    for title, table in (("State of a host", vocabulary.HOST_STATES), ("State of a run", vocabulary.RUN_STATES)):
        lines += [f"## {title}", "", "| state | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {inline(text)} |" for name, text in table.items()] + [""]
    lines += [
        "`ansible-playbook` ends with 0 only when the state of the run is `ok`; `failed=0` in Ansible's own recap is",
        "not the sign of success.", "",
        "## Checks", "",
        "A check is `{id, level, stage, status, expected, actual, hint, evidence}` with status "
        + ", ".join(f"`{word}`" for word in vocabulary.CHECK_STATUSES) + ".",
        "An id with `:object` names what was looked at, such as `ext.import:vllm._C`. *Required when* says under which",
        "condition the check decides; otherwise it is advisory. *Settled by*: an `unknown` of this check does not",
        "count where that other check passed on the same host.", "",
    ]
    for stage in vocabulary.CHECK_STAGES:
        lines += [f"### Stage {stage}", ""]
        lines += ["| id | question | required when | settled by | remedy |", "|---|---|---|---|---|"]
        for name, entry in vocabulary.CHECKS.items():
            if entry["stage"] != stage:
                continue
            shown = name + (":object" if entry.get("object") else "")
            cover = f"`{entry['covered_by']}`" if entry.get("covered_by") else ""
            lines.append(
                f"| `{shown}` | {inline(entry['question'])} | {entry['required_when'].replace('_', ' ')} | {cover} "
                f"| {inline(entry['remedy'])} |"
            )
        lines.append("")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Every generated file with the text it must have."""
    made = {REPO / "docs/variables.md": variables(), REPO / "docs/checks.md": checks()}
    for name, schema in schemas.SCHEMAS.items():
        made[REPO / f"docs/schema/{name}.json"] = json.dumps(schema, indent=2) + "\n"
    return made


def stale() -> list[str]:
    """Relative paths of generated files that differ from their data, or should not be there."""
    made = pages()
    bad = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    bad += [path for path in sorted((REPO / "docs/schema").glob("*")) if path not in made]
    return [str(path.relative_to(REPO)) for path in bad]


def main() -> int:
    """Write the pages, or with ``--check`` only compare."""
    parser = argparse.ArgumentParser(description="Makes docs/variables.md, docs/checks.md and docs/schema/*.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is stale")
    if parser.parse_args().check:
        for path in stale():
            print(f"{path} is not what its data says. Fix: .venv/bin/python tools/generate_docs.py")
        return 1 if stale() else 0
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
