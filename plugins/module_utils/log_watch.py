# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a server's log says: its auxiliary layers, its progress, and why it died.

A log spans processes; every reading begins at the launcher's line of the process in question.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import checks
from ansible_collections.dflash.fleet.plugins.module_utils.launcher import LOG_LINE

#: What of a process's log is looked at: the start, where it says what it serves, and the end.
HEAD = 16 << 20
TAIL = 256 << 10

AUX = re.compile(r"Using (?:Eagle3 )?auxiliary layers from (speculative config|config|model): [\[(]([0-9, ]*)[\])]")
PREFIX = re.compile(r"^\(([A-Za-z_]\w*)[^()]*? ?pid=(\d+)\) ")
LEVEL = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
#: Lines that cannot be why a server died, and lines that may.
HARMLESS = re.compile(r"(?:DEBUG|INFO|WARNING) \d\d-\d\d |" + re.escape(LOG_LINE))
GRAVE = re.compile(r"(?:ERROR|CRITICAL) \d\d-\d\d ")
VALIDATION = re.compile(r"\d+ validation errors? for \w+$")
ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt)\b(?::|$)")

#: Why servers die early: pattern, what it means, what mends it.  The first that matches anywhere wins.
DEATHS: Tuple[Tuple[str, str, str], ...] = (
    (r"dflash launcher cannot start", "The launcher could not start the server.", "Read the line."),
    (r"mixed sliding/full (?:attention|dflash draft(?:er)?s?)", "A drafter of mixed layers needs the V2 runner.",
     "Set VLLM_USE_V2_MODEL_RUNNER: '1' in dflash_serve_environment, or pin a vLLM where it is the default."),
    (r"Model Runner V2 requires Triton", "The V2 runner needs Triton, which this host has not.",
     "Serve an all-full or all-sliding drafter, or use a GPU host."),
    (r"[Aa]ddress already in use", "Another process holds the port.",
     "Stop it, or choose another dflash_serve_port."),
    (r"Free memory on device.*less than desired", "The GPU's memory is in use by somebody else.",
     "Find the holder with nvidia-smi, or lower gpu-memory-utilization."),
    (r"(?:OutOfMemoryError|CUDA out of memory)", "The GPU's memory does not suffice.",
     "Lower gpu-memory-utilization, max-model-len or max-num-seqs in dflash_serve_engine_args."),
    (r"No available memory for the cache blocks", "No memory is left for the key-value cache.",
     "Raise gpu-memory-utilization, or VLLM_CPU_KVCACHE_SPACE on a CPU host."),
    (r"Unexpected keyword argument", "This vLLM does not know one of the configuration's keys.",
     "Remove the key from dflash_serve_speculative_config, or pin a newer vLLM."),
    (r"unrecognized arguments?:", "This vLLM does not know one of the options.",
     "Remove it from dflash_serve_engine_args, or pin a newer vLLM."),
    (r"mat1 and mat2 shapes cannot be multiplied", "Drafter and target do not belong together.",
     "Pair the drafter with the target it was trained for."),
    (r"operator torchvision::nms does not exist", "torchvision belongs to another torch.",
     "Leave torchvision out with vllm_release_exclude, or use the one made for the layer's torch."),
    (r"cannot open shared object file", "A library is missing on this host.",
     "Install the driver or toolkit that the line names, then deploy again."),
    (r"max_num_scheduled_tokens is set to", "A full batch of drafts does not fit into one step.",
     "Raise max-num-batched-tokens, or lower max-num-seqs or the number of speculative tokens."),
    (r"Permission denied", "The service account may not read or write something.",
     "Give the service account the right that the line names."),
)


class Aux(NamedTuple):
    """One auxiliary-layer line: who wrote it, where the ids came from, the ids."""

    process: str
    pid: Optional[int]
    source: str
    ids: List[int]


def section(path: str, run: Mapping[str, Any]) -> str:
    """The log of one process (``{pid, start_ticks, boot_id}``): its first 16 MB and its last 256 kB.

    "" when the log does not hold the launcher's line of this process.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as handle:
            offset = run.get("log_offset")
            begin = offset if isinstance(offset, int) and 0 <= offset < size else 0
            found = _own(handle, begin, run)
            if found is None and begin:
                found = _own(handle, 0, run)
            if found is None:
                return ""
            handle.seek(found)
            head = handle.read(HEAD)
            rest = size - found - len(head)
            if rest <= 0:
                return head.decode("utf-8", errors="replace")
            handle.seek(size - min(rest, TAIL))
            return (head + b"\n" + handle.read()).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _own(handle: Any, begin: int, run: Mapping[str, Any]) -> Optional[int]:
    """Where the log of this process begins: right behind the launcher's line."""
    handle.seek(begin)
    place: Optional[int] = None
    wanted = tuple(run.get(name) for name in ("pid", "start_ticks", "boot_id"))
    marker = LOG_LINE.encode("ascii")
    position = begin
    for line in handle:
        position += len(line)
        if line.startswith(marker):
            try:
                said = json.loads(line[len(marker):].decode("utf-8", errors="replace"))
            except ValueError:
                continue
            if tuple(said.get(name) for name in ("pid", "start_ticks", "boot_id")) == wanted:
                place = position
    return place


def tail(path: str, size: int = 16384) -> str:
    """The end of a log, "" where there is none."""
    try:
        with open(path, "rb") as handle:
            handle.seek(max(0, os.path.getsize(path) - size))
            return handle.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def plain(line: str) -> str:
    """A log line without its process and level marks."""
    return LEVEL.sub("", PREFIX.sub("", line.rstrip()))


def aux_layers(text: str) -> List[Aux]:
    """Every auxiliary-layer line of a log."""
    out = []
    for line in text.splitlines():
        found = AUX.search(line)
        if found:
            who = PREFIX.match(line)
            ids = [int(part) for part in found.group(2).replace(" ", "").split(",") if part]
            out.append(Aux(who.group(1) if who else "", int(who.group(2)) if who else None, found.group(1), ids))
    return out


def aux_check(text: str, taps: Sequence[int], pids: Optional[Sequence[int]] = None) -> checks.Check:
    """``serving.aux_layers``: every line names the taps and took them from the drafter's configuration.

    Advisory: the words of a log differ by release; that the layers are right is what the canary pair settles.
    ``pids`` are the processes of the instance; a line of another process is left out.
    """
    lines = [aux for aux in aux_layers(text) if pids is None or aux.pid is None or aux.pid in pids]
    expected = "layers %s, from the configuration" % (list(taps),)
    evidence = [{"process": a.process, "pid": a.pid, "from": a.source, "layers": a.ids} for a in lines] or None

    def say(status: str, actual: str, hint: Optional[str] = None) -> checks.Check:
        return checks.make(
            "serving.aux_layers", status, expected, actual, level="advisory", hint=hint, evidence=evidence,
        )

    if not lines:
        return say("unknown", "no such line in the log of this process",
                   "The log level may hide it: remove VLLM_LOGGING_LEVEL and VLLM_CONFIGURE_LOGGING.")
    for aux in lines:
        if aux.source == "model":
            return say("fail", "layers %s, from the model" % aux.ids,
                       "The runner did not find the drafter's target layer ids and took defaults: pin another vLLM.")
        if aux.ids != list(taps):
            shifted = [i + 1 for i in aux.ids] == list(taps)
            return say("fail", "layers %s" % aux.ids,
                       "The ids are used unshifted, one layer too early: pin a vLLM with the + 1." if shifted else None)
    return say("pass", "layers %s" % lines[0].ids)


def first_error(text: str) -> Dict[str, str]:
    """``{line, meaning, fix}`` of the first error in a log; empty strings where there is none.

    The end of a log only says that an engine died; what killed it stands further up.
    """
    lines = _joined([plain(raw).strip() for raw in text.splitlines() if not HARMLESS.match(PREFIX.sub("", raw))])
    for pattern, meaning, fix in DEATHS:
        found = next((line for line in lines if re.search(pattern, line)), "")
        if found:
            return {"line": found[:500], "meaning": meaning, "fix": fix}
    errors = [line for line in lines if ERROR.match(line)]
    marked = [plain(raw).strip() for raw in text.splitlines() if GRAVE.match(PREFIX.sub("", raw))]
    return {"line": (errors + marked + [""])[0][:500], "meaning": "", "fix": ""}


def _joined(lines: List[str]) -> List[str]:
    """Validation errors, which go over three lines (whose, which key, what), as one."""
    out: List[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if VALIDATION.search(line):
            while number < len(lines) and lines[number] and not lines[number].startswith("For further information"):
                line += ": " + lines[number].partition(" [type=")[0]
                number += 1
        out.append(line)
    return out


def last_line(text: str) -> str:
    """The last line that says something: what a server that is loading is at."""
    for line in reversed(text.splitlines()):
        said = plain(line).strip()
        if said and not line.startswith(LOG_LINE):
            return said[:200]
    return ""
