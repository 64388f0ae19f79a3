# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Deploys DFlash servers from Python; the work is done by the Ansible collection ``dflash.fleet``."""

__version__ = "0.1.0"
