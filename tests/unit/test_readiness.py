# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Ready, dead, late, or somebody else: what is said of an instance's server."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import readiness
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from tests.unit.serve_place import Place, place, wait
from tests.unit.stub_server import StubServer

__all__ = ["place"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, ""),
        ({"chat": False}, ""),  # no chat template: asked plainly
        ({"model": "other"}, "it serves other, not stub"),
        ({"healthy": False}, "/health answers 503"),
        ({"status": 500}, "it gives no token: HTTP 500: the stub refuses"),
        ({"key": "k"}, "the API key is refused (HTTP 401)"),
    ],
)
def test_a_server_that_answers_but_is_not_ready(settings: dict[str, Any], reason: str) -> None:
    with StubServer([], **settings) as stub:
        assert readiness.Probe("/r", "main", "d", stub.url, "stub").token() == reason


def test_another_release_than_the_deployments_is_not_the_process(place: Place) -> None:
    place.stage("d1")
    place.server.start("d1")
    assert place.probe("d1").wait()["ready"]
    link = Path(place.root, "instances", "main", "deployments", "d1", "release")
    other = Path(place.root, "releases", "other")
    other.mkdir()
    link.unlink()
    link.symlink_to(other)
    item = place.probe("d1").process_check()
    assert (item["status"], item["actual"]) == ("fail", "no file of that release is in use")


def test_a_stranger_on_the_port_is_not_the_process(place: Place) -> None:
    place.stage("d1", "loads")
    place.server.start("d1")
    with socket.create_server(("127.0.0.1", place.port)):
        item = place.probe("d1").process_check()
    assert item["status"] == "fail"
    assert "port %d is held by process %d" % (place.port, os.getpid()) in item["actual"]
    item = place.probe("d1").process_check()
    assert item["actual"] == "port %d is held by nobody" % place.port


def test_an_early_death_is_told_by_its_first_error(place: Place) -> None:
    place.stage("d1", "dies")
    try:
        place.server.start("d1")
    except DflashError:
        pass  # it may be dead before it was seen alive
    found = place.probe("d1").wait()
    assert (found["ready"], found["dead"]) == (False, True)
    item = place.probe("d1").judge(found)[0]
    assert item["status"] == "fail"
    assert item["evidence"]["first_error"] == "ValueError: no such thing"
    assert "First error: ValueError: no such thing." in item["hint"]


def test_a_server_that_loads_is_not_ready_and_then_late(place: Place) -> None:
    place.stage("d1", "loads")
    place.server.start("d1")
    wait(lambda: place.probe("d1").look()["progress"] == "Loading weights", "progress")
    found = place.probe("d1").look()
    assert (found["ready"], found["dead"], found["late"]) == (False, False, False)
    assert found["reason"] == "Connection refused"
    time.sleep(0.4)
    probe = place.probe("d1", ready_timeout=0.3)
    late = probe.wait()
    assert late["late"]
    item = probe.judge(late)[0]
    assert item["status"] == "fail"
    assert "It was at: Loading weights." in item["hint"]


