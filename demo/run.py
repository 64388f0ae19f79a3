#!/usr/bin/env python3
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The demo: the whole pipeline on this machine, the same job again, or a build that is broken on purpose.

    demo/run.py                    deploy to localhost; a second run changes nothing
    demo/run.py --break NAME       a candidate with one fault; it must not be proven
    demo/run.py --down             stop the server of this clone

It only prepares the source repository and then starts ansible-playbook, whose exit code it returns. With --break the
exit code is 0 when the pipeline refused the candidate or rolled it back, and 1 when it did not notice.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

REPO = pathlib.Path(__file__).resolve().parent.parent
SERIES = ["demo/series/0001-cpu-slot-mapping.patch", "demo/series/0002-cpu-expand-sampling.patch"]
BREAKS = ("layer_offset", "truncated_so")


def demo_root() -> str:
    """``dflash_root`` of the local inventory, as Ansible evaluates it."""
    done = subprocess.run(
        ["ansible", "-i", "inventory", "localhost", "-m", "ansible.builtin.debug", "-a", "var=dflash_root"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, ANSIBLE_CALLBACK_RESULT_FORMAT="json"),
    )
    try:
        return str(json.loads(done.stdout.split("=>", 1)[1])["dflash_root"])
    except (IndexError, KeyError, ValueError):
        sys.exit(f"demo: Ansible does not read the local inventory: {done.stdout}{done.stderr}")


def playbook(name: str, *extra: str) -> int:
    """Run a playbook over the local inventory in this terminal; a TERM to this process reaches it too."""
    with subprocess.Popen(["ansible-playbook", name, "-i", "inventory", *extra], cwd=REPO) as child:
        signal.signal(signal.SIGTERM, lambda number, _frame: child.send_signal(number))
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the terminal told the child too; its end decides


def newest() -> str:
    """Name of the newest run, empty before the first."""
    latest = REPO / "runs" / "latest"
    return os.readlink(latest) if latest.is_symlink() else ""


def broken(name: str) -> int:
    """Deploy a candidate with one fault and say whether it was noticed."""
    extra = {
        "vllm_source_series": [*SERIES, f"demo/breaks/{name}.patch"],
        "vllm_source_lock_file": f".demo/{name}.lock.json",
        "demo_break": name,
    }
    (REPO / ".demo").mkdir(exist_ok=True)
    before = newest()
    code = playbook("demo/break.yml", "-e", json.dumps(extra))
    if code == 0:
        print(f"demo: the fault {name} was NOT noticed", flush=True)
        return 1
    if newest() == before:
        print("demo: the run ended before its verdict, so nothing is known of the fault", flush=True)
        return 1
    verdict = json.loads((REPO / "runs" / "latest" / "verdict.json").read_text(encoding="utf-8"))
    host = verdict["hosts"]["localhost"]
    if host["state"] not in ("refused", "rolled_back") or host["phase"] not in ("prove_build", "roll_out"):
        print(f"demo: the run failed for another reason (state {host['state']}): {host['reason']}", flush=True)
        return 1
    print(f"demo: the candidate with the fault {name} is {host['state']}; `make demo` shows what serves", flush=True)
    return 0


def end_supervisor(root: str) -> None:
    """End the service manager that the demo started below its root; under systemd there is none."""
    try:
        pid = int((pathlib.Path(root) / "run" / "supervisord.pid").read_text(encoding="ascii"))
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if f"{root}/" not in command or "supervisord" not in command:
            return
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            if not pathlib.Path(f"/proc/{pid}").exists():
                return
            time.sleep(0.1)
    except (OSError, ValueError):
        return


def main() -> int:
    """Prepare, run, return the exit code."""
    parser = argparse.ArgumentParser(description="Run the demo on this machine.")
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--break", dest="fault", metavar="NAME", help="one of " + ", ".join(BREAKS))
    act.add_argument("--down", action="store_true", help="stop the server of this clone")
    args = parser.parse_args()
    if args.fault and args.fault not in BREAKS:
        parser.error(f"there is no break {args.fault!r}; there are {', '.join(BREAKS)}")
    root = demo_root()
    if args.down:
        code = playbook("demo/down.yml")
        end_supervisor(root)
        print(f"demo: stopped. To forget everything it made: rm -rf {root} {root}-demo", flush=True)
        return code
    code = subprocess.call([sys.executable, "demo/source.py", f"{root}-demo/vllm.git"], cwd=REPO)
    if code:
        return code
    return broken(args.fault) if args.fault else playbook("deploy_dflash.yml")


if __name__ == "__main__":
    sys.exit(main())
