# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Does the drafter work?  Drive real requests, compare counters, and name what is wrong.

A drafter that is wired wrongly is silent: the target verifies, so the text stays right.  Only the
counters tell, and each way in which they can be bad has another cause and another sentence.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import checks, http, metrics
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

CONCURRENCY = 4
#: An answer to an item without a known answer, and the most tokens asked for.
UNKNOWN_ANSWER = "Noted. I will come back to it."
ANSWER_TOKENS = 256
#: Seconds that the counters may lag behind the answers, and for which the server is watched before.
SETTLE_S = 5.0
IDLE_S = 0.5
ANSWER_TIMEOUT_S = 120.0


class Plan(NamedTuple):
    """One request: the item asked for and the items told before it."""

    item: int
    before: Tuple[int, ...]


def plans(count: int, deepest: int = 3) -> Iterator[Plan]:
    """Requests over ``count`` items, no two alike: each item with each earlier item, then with two, then three.

    Items take turns, so that few requests see many items.  One item alone gives one request.
    """
    if count == 1:
        yield Plan(0, ())
        return
    for depth in range(1, deepest + 1):
        for shifts in itertools.product(range(1, count), repeat=depth):
            for item in range(count):
                before = tuple((item + shift) % count for shift in shifts)
                if len(set(before)) == depth:
                    yield Plan(item, before)


def messages(items: Sequence[Mapping[str, Any]], plan: Plan) -> List[Dict[str, str]]:
    """The chat of a request: earlier turns with their answers, then the question."""
    out = []
    for index in plan.before:
        out.append({"role": "user", "content": str(items[index]["q"])})
        out.append({"role": "assistant", "content": str(items[index].get("a") or UNKNOWN_ANSWER)})
    out.append({"role": "user", "content": str(items[plan.item]["q"])})
    return out


def request(items: Sequence[Mapping[str, Any]], plan: Plan, model: str, extra: Mapping[str, Any]) -> Dict[str, Any]:
    """The body of a chat completion: greedy, and long enough for the answer (a token has at least one letter)."""
    answer = items[plan.item].get("a")
    body: Dict[str, Any] = {
        "model": model, "messages": messages(items, plan), "temperature": 0, "stream": False,
        "max_tokens": max(32, len(str(answer)) + 8) if answer else ANSWER_TOKENS,
    }
    body.update(extra)
    return body


@dataclass
class Measurement:
    """What was seen.  ``trouble`` says why nothing could be measured; ``counters`` is the difference."""

    trouble: str = ""
    detail: str = ""
    counters: Optional[metrics.Snapshot] = None
    requests: int = 0
    seconds: float = 0.0
    foreign: List[str] = field(default_factory=list)
    errors: List[str] = field(default_factory=list)
    answers: List[Tuple[int, str]] = field(default_factory=list)
    levels: List[int] = field(default_factory=list)


class Driver:
    """Drives one measurement against one server."""

    def __init__(
        self, client: http.Client, metrics_url: str, model: str, items: Sequence[Mapping[str, Any]],
        min_drafts: int, budget_s: float, concurrency: int = CONCURRENCY, extra: Optional[Mapping[str, Any]] = None,
    ) -> None:
        if not items or any(not isinstance(item, Mapping) or not item.get("q") for item in items):
            raise DflashError("Every prompt needs a question (q), and there must be one", "items", "Give [{q, a}].")
        self.client, self.metrics_url, self.model, self.items = client, metrics_url, model, items
        self.min_drafts, self.budget_s, self.concurrency = min_drafts, budget_s, max(1, concurrency)
        self.extra = dict(extra or {})
        self.seen = Measurement()

    def run(self) -> Measurement:
        """Measure.  Never raises for what the server does."""
        begun = time.monotonic()
        try:
            before = self._ready()
            if before is not None:
                self._drive(before, begun + self.budget_s)
        except http.NoAnswer as error:
            self._trouble("unreachable", str(error))
        except metrics.CounterReset as error:
            self._trouble("restarted", str(error))
        self.seen.seconds = round(time.monotonic() - begun, 1)
        return self.seen

    def _trouble(self, word: str, detail: str) -> None:
        self.seen.trouble, self.seen.detail = word, detail

    def _snapshot(self) -> Optional[metrics.Snapshot]:
        answer = self.client.get(self.metrics_url)
        if answer.status != 200:
            self._trouble("no_metrics", answer.complaint())
            return None
        found = metrics.parse(answer.text)
        if not found.is_vllm:
            self._trouble("no_metrics", "no counter of vLLM stands there")
            return None
        if not found.speculates:
            self._trouble("not_counted", metrics.DRAFTS)
            return None
        return found

    def _ready(self) -> Optional[metrics.Snapshot]:
        """One request to warm up, then a look whether anybody else is served."""
        if self._snapshot() is None:
            return None
        self._ask(Plan(0, ()))
        self.seen.answers.clear()
        if self.seen.errors:
            return None
        self._settle(None)
        first = self._snapshot()
        time.sleep(IDLE_S)
        second = self._snapshot()
        if first is None or second is None:
            return None
        idle = metrics.difference(first, second)
        if idle.drafts:
            self.seen.foreign.append("%d drafts were made while this test asked nothing" % idle.drafts)
        elif second.running:
            self.seen.foreign.append("%d other requests were being served at the start" % second.running)
        return second

    def _ask(self, plan: Plan) -> None:
        answer = self.client.post(
            "/v1/chat/completions", request(self.items, plan, self.model, self.extra), ANSWER_TIMEOUT_S,
        )
        value = answer.json()
        try:
            text = value["choices"][0]["message"].get("content") or ""
        except (TypeError, KeyError, IndexError, AttributeError):
            self.seen.errors.append(answer.complaint())
            return
        self.seen.answers.append((plan.item, str(text)))

    def _drive(self, before: metrics.Snapshot, deadline: float) -> None:
        """Batches of 1, 2, 3, 4 requests at once, over and over, until enough drafts were counted.

        A server that made no draft in a whole cycle will make none later.
        """
        pending = plans(len(self.items))
        sizes = itertools.cycle(range(1, self.concurrency + 1))
        with ThreadPoolExecutor(self.concurrency) as pool:
            while True:
                size = next(sizes)
                batch = list(itertools.islice(pending, size))
                for done in [pool.submit(self._ask, plan) for plan in batch]:
                    done.result()
                self.seen.requests += len(batch)
                if batch and len(batch) not in self.seen.levels:
                    self.seen.levels.append(len(batch))
                now = self._snapshot()
                if now is None:
                    return
                so_far = metrics.difference(before, now)
                all_sizes = size == self.concurrency or len(batch) < size
                enough = all_sizes and (not so_far.drafts or so_far.drafts >= self.min_drafts)
                if enough or not batch or self.seen.errors or time.monotonic() > deadline:
                    break
        self._settle(before)
        after = self._snapshot()
        if after is None:
            return
        self.seen.counters = metrics.difference(before, after)
        counted = int(self.seen.counters.requests)
        asked = self.seen.requests - len(self.seen.errors)
        if counted > asked:
            self.seen.foreign.append("%d requests were counted, %d were this test's" % (counted, asked))
        elif counted < asked:
            self.seen.foreign.append(
                "only %d of this test's %d requests were counted: is %s this server's?"
                % (counted, asked, self.metrics_url)
            )

    def _settle(self, before: Optional[metrics.Snapshot]) -> None:
        """Wait until the counters have what was answered: they lag behind by a step."""
        limit = time.monotonic() + SETTLE_S
        last: Optional[Tuple[float, float, float]] = None
        while time.monotonic() < limit:
            now = self._snapshot()
            if now is None:
                return
            marks = (now.requests, now.drafts or 0.0, now.accepted)
            asked = self.seen.requests - len(self.seen.errors)
            complete = before is None or now.requests - before.requests >= asked
            if marks == last and complete:
                return
            last = marks
            time.sleep(0.1)


def floor_of(
    floor: float, k: int, last_good: Optional[float] = None, published: Optional[float] = None,
    last_good_share: float = 0.85, published_share: float = 0.6,
) -> Tuple[float, str]:
    """The highest of the floors that apply, and where it comes from.

    K tokens drafted give an AL of at most K + 1: a floor above is a mistake in the inputs, a
    published or earlier figure above it belongs to another K and does not apply.
    """
    most = k + 1
    if floor > most:
        raise DflashError(
            "The floor %s cannot be reached with %d speculative tokens: the most is %d" % (floor, k, most),
            "floor", "Lower the floor.",
        )
    found = [(round(float(floor), 3), "configured")]
    if last_good and last_good <= most:
        found.append((round(last_good * last_good_share, 3), "%d %% of this host's last good %s" % (
            round(last_good_share * 100), round(last_good, 3))))
    if published and published <= most:
        found.append((round(published * published_share, 3), "%d %% of the published %s" % (
            round(published_share * 100), round(published, 3))))
    return max(found, key=lambda item: item[0])


def _words(seen: Measurement, floor: float, min_drafts: int, k: int, base_url: str) -> Tuple[str, Any, Optional[str]]:
    """``(status, actual, hint)``: the one sentence that fits."""
    if seen.trouble == "unreachable":
        return "fail", "no answer", "%s does not answer: %s." % (base_url, seen.detail)
    if seen.trouble == "restarted":
        return "fail", "restarted", "The server was started anew while it was measured (%s): it crashed." % seen.detail
    if seen.trouble == "no_metrics":
        return "fail", "no metrics", "The address of the counters gives none: %s." % seen.detail
    if seen.trouble == "not_counted":
        return "fail", "not counted", (
            "The counters have no %s: the server runs without speculative decoding, or with disable-log-stats."
            % seen.detail
        )
    if seen.errors:
        return "fail", "%d requests refused" % len(seen.errors), "The server refuses requests: %s" % seen.errors[0]
    counters = seen.counters
    if counters is None or not counters.drafts:
        return "fail", "no draft", (
            "%d requests were answered without a single draft: the server does not use its drafter." % seen.requests
        )
    length = round(counters.acceptance_length or 0.0, 3)
    drafts, accepted = int(counters.drafts), int(counters.accepted)
    if drafts < min_drafts:
        return "unknown", length, (
            "%d drafts are too few to judge (%d are needed): give more prompts or a longer dflash_accept budget."
            % (drafts, min_drafts)
        )
    if not accepted:
        return "fail", length, (
            "Not one token of %d drafts was accepted. A weak drafter hits some; this one is wired wrongly: layers, "
            "window, head or mask token. The build or the pair is at fault, not the drafter's quality." % drafts
        )
    if length < floor:
        rates = list(counters.rates.values())
        text = "Accepted %d tokens in %d drafts, %s of at most %d per round." % (accepted, drafts, length, k + 1)
        if len(rates) > 2 and rates[0] > 0.5 and rates[-1] < 0.05:
            text += (
                " The first positions hit and the last do not: the window is dropped, or the context is longer than "
                "the drafter was trained for."
            )
        elif length < 1.05:
            text += " That is chance: the drafter is wired wrongly, is not trained, or belongs to another target."
        elif rates and rates[0] < 0.1:
            text += " Even the first position misses: the drafter reads wrong layers, or belongs to another target."
        return "fail", length, text
    return "pass", length, ""


def judge(
    check_id: str, seen: Measurement, *, floor: float, origin: str, min_drafts: int, k: int, base_url: str,
) -> checks.Check:
    """``serving.al`` or ``serving.canary_al``."""
    status, actual, hint = _words(seen, floor, min_drafts, k, base_url)
    if seen.foreign:
        hint = ("%s Others were served meanwhile, and count: %s." % (hint or "", "; ".join(seen.foreign))).strip()
    evidence: Dict[str, Any] = {
        "floor": origin, "requests": seen.requests, "concurrency": sorted(seen.levels), "seconds": seen.seconds,
        "foreign": seen.foreign, "errors": seen.errors[:3],
    }
    counters = seen.counters
    if counters is not None:
        evidence.update(
            drafts=int(counters.drafts or 0), draft_tokens=int(counters.draft_tokens), accepted=int(counters.accepted),
            per_position=[round(rate, 3) for rate in counters.rates.values()], engines=counters.engines,
        )
        if counters.drafts and counters.draft_tokens != counters.drafts * k:
            per_draft = counters.draft_tokens / counters.drafts
            evidence["note"] = "%.2f tokens drafted per draft, %d configured" % (per_draft, k)
    return checks.make(check_id, status, ">= %s" % floor, actual, hint=hint, evidence=evidence)


def compare_text(items: Sequence[Mapping[str, Any]], seen: Measurement) -> checks.Check:
    """``serving.text``: each answer is, word for word, the one the target was trained to give."""
    known = [(index, text) for index, text in seen.answers if items[index].get("a")]
    if not known:
        return checks.make(
            "serving.text", "unknown", "every answer word for word", "no answer to compare",
            hint="No request was answered, or no prompt has a known answer (a).",
        )
    wrong = [(index, text) for index, text in known if text.strip() != str(items[index]["a"]).strip()]
    actual = "%d of %d answers" % (len(known) - len(wrong), len(known))
    expected = "%d of %d answers word for word" % (len(known), len(known))
    if not wrong:
        return checks.make("serving.text", "pass", expected, actual)
    index, text = wrong[0]
    wanted, got = str(items[index]["a"]).split(), text.split()
    place = next((n for n, pair in enumerate(zip(wanted, got)) if pair[0] != pair[1]), min(len(wanted), len(got)))
    evidence = {
        "question": str(items[index]["q"])[:200], "word": place + 1,
        "expected": " ".join(wanted[max(0, place - 3):place + 5]), "found": " ".join(got[max(0, place - 3):place + 5]),
    }
    return checks.make("serving.text", "fail", expected, actual, evidence=evidence)


def answer(options: Mapping[str, Any], key: Optional[str]) -> Dict[str, Any]:
    """What ``dflash_acceptance`` returns, from its options.  Raises ``DflashError`` for unusable ones."""
    base_url, k = options["base_url"], options["k"]
    floor, origin = floor_of(
        options["floor"], k, options.get("last_good"), options.get("published"), options["last_good_share"],
        options["published_share"],
    )
    client = http.Client(base_url, key)
    driver = Driver(
        client, options.get("metrics_url") or client.base_url + "/metrics", options["served_name"], options["items"],
        options["min_drafts"], options["budget_s"], options["concurrency"], options.get("request"),
    )
    seen = driver.run()
    found = [judge(
        options["check_id"], seen, floor=floor, origin=origin, min_drafts=options["min_drafts"], k=k, base_url=base_url,
    )]
    if options["compare_text"]:
        found.append(compare_text(options["items"], seen))
    counters = seen.counters or metrics.Snapshot()
    length = counters.acceptance_length
    return {
        "checks": found, "acceptance_length": None if length is None else round(length, 3),
        "per_position": [round(rate, 3) for rate in counters.rates.values()], "drafts": int(counters.drafts or 0),
        "draft_tokens": int(counters.draft_tokens), "accepted": int(counters.accepted), "requests": seen.requests,
        "floor": {"value": floor, "origin": origin}, "foreign": seen.foreign, "seconds": seen.seconds,
    }
