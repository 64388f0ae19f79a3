# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What an action plugin gets from Ansible, for tests that run one without a play."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ansible.parsing.dataloader import DataLoader


class Templar:
    """Gives values as they are; ``{{ name }}`` is an error, as an undefined variable is."""

    def template(self, value: Any) -> Any:
        from ansible.errors import AnsibleUndefinedVariable

        if isinstance(value, str) and value.startswith("{{"):
            raise AnsibleUndefinedVariable("'%s' is undefined\nmore" % value.strip("{} "))
        return value


class Terminal:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def display(self, line: str, *_args: Any, **_kwargs: Any) -> None:
        self.lines.append(line)


def plugin(kind: Any, check_mode: bool = False, **args: Any) -> Any:
    """An instance of an action plugin; ``_display.lines`` holds what it shows."""
    task = SimpleNamespace(async_val=0, check_mode=check_mode, args=args, action="x")
    made = kind(
        task=task, connection=SimpleNamespace(_shell=SimpleNamespace(tmpdir=None)), play_context=None,
        loader=DataLoader(), templar=Templar(), shared_loader_obj=None,
    )
    made._display = Terminal()
    return made
