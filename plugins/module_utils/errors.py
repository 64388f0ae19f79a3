# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The one exception that users see."""

from __future__ import annotations

from typing import Optional


class DflashError(Exception):
    """Something a person has to act on: what is wrong, where, and what mends it.

    ``what`` is one sentence, ``where`` a path, host, variable or command, ``fix`` the act or
    command that mends it.  Modules turn it into ``fail_json(msg=str(error))``; nothing else may
    reach a user as a traceback.
    """

    def __init__(self, what: str, where: Optional[str] = None, fix: Optional[str] = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += " [%s]" % self.where
        if self.fix:
            text += " Fix: %s" % self.fix
        return text
