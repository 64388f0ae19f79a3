# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Each way in which a drafter can be bad has its own status and its own sentence."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import acceptance, metrics
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from tests.unit.stub_server import StubServer

ITEMS = [{"q": "Describe item %d." % n, "a": "Item %d is a blue clock from Lisbon." % n} for n in range(6)]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "IDLE_S", 0.05)
    monkeypatch.setattr(acceptance, "SETTLE_S", 0.6)


def ask(url: str, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "base_url": url, "served_name": "stub", "check_id": "serving.canary_al", "items": ITEMS, "floor": 6.0,
        "last_good": 0, "last_good_share": 0.85, "published": 0, "published_share": 0.6, "min_drafts": 48, "k": 7,
        "budget_s": 20, "concurrency": 4, "compare_text": True, "request": {},
    }
    given.update(options)
    return acceptance.answer(given, given.pop("key", None))


def test_right_server_passes_with_numbers() -> None:
    with StubServer(ITEMS) as stub:
        found = ask(stub.url)
    al, text = found["checks"]
    assert (al["id"], al["status"], al["expected"], al["actual"]) == ("serving.canary_al", "pass", ">= 6.0", 7.0)
    assert (text["id"], text["status"], text["actual"]) == ("serving.text", "pass", "10 of 10 answers")
    assert found["acceptance_length"] == 7.0
    assert found["per_position"] == [1.0] * 6 + [0.0]
    assert (found["drafts"], found["accepted"], found["draft_tokens"], found["requests"]) == (100, 600, 700, 10)
    assert found["foreign"] == []
    assert json.dumps(found)


def test_each_request_is_greedy_distinct_and_has_an_earlier_turn() -> None:
    with StubServer(ITEMS) as stub:
        ask(stub.url, min_drafts=200, request={"chat_template_kwargs": {"enable_thinking": False}})
        bodies, most = stub.seen[1:], stub.most_at_once
    assert len(bodies) == 20
    assert len({json.dumps(body["messages"]) for body in bodies}) == len(bodies)
    for body in bodies:
        assert body["temperature"] == 0
        assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
        assert body["messages"][0]["content"] != body["messages"][2]["content"]
        assert body["max_tokens"] >= len(ITEMS[0]["a"])
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert most >= 2


@pytest.mark.parametrize(
    ("settings", "status", "actual", "words"),
    [
        ({"speculates": False}, "fail", "not counted", "without speculative decoding, or with disable-log-stats"),
        ({"vllm": False}, "fail", "no metrics", "no counter of vLLM"),
        ({"drafts": 0, "accepted": 0}, "fail", "no draft", "does not use its drafter"),
        ({"accepted": 0}, "fail", 1.0, "wired wrongly"),
        ({"accepted": 3}, "fail", 4.0, "Accepted 300 tokens in 100 drafts, 4.0 of at most 8"),
        ({"status": 500}, "fail", "1 requests refused", "HTTP 500: the stub refuses"),
        ({"key": "k"}, "fail", "1 requests refused", "Unauthorized"),
    ],
)
def test_each_fault_has_its_sentence(settings: dict[str, Any], status: str, actual: Any, words: str) -> None:
    with StubServer(ITEMS, **settings) as stub:
        al = ask(stub.url)["checks"][0]
    assert (al["status"], al["actual"]) == (status, actual)
    assert words in al["hint"]


def test_sentences_differ_from_each_other() -> None:
    hints = set()
    for settings in ({"speculates": False}, {"vllm": False}, {"drafts": 0}, {"accepted": 0}, {"accepted": 3}):
        with StubServer(ITEMS, **settings) as stub:
            hints.add(ask(stub.url)["checks"][0]["hint"])
    hints.add(ask("http://127.0.0.1:9")["checks"][0]["hint"])
    assert len(hints) == 6


def test_unreachable_server() -> None:
    al, text = ask("http://127.0.0.1:9")["checks"]
    assert (al["status"], al["actual"]) == ("fail", "no answer")
    assert al["hint"] == "http://127.0.0.1:9 does not answer: Connection refused."
    assert text["status"] == "unknown"


def test_too_few_drafts_are_unknown_even_when_none_was_accepted() -> None:
    for accepted in (0, 6):
        with StubServer(ITEMS[:2], drafts=3, accepted=accepted) as stub:
            al = ask(stub.url, items=ITEMS[:2], min_drafts=200)["checks"][0]
        assert al["status"] == "unknown"
        assert "6 drafts are too few to judge (200 are needed)" in al["hint"]


def test_budget_ends_the_test() -> None:
    with StubServer(ITEMS, drafts=1) as stub:
        found = ask(stub.url, min_drafts=10**6, budget_s=0.3)
    assert found["checks"][0]["status"] == "unknown"
    assert found["seconds"] < 5


def test_wrong_text_is_named_with_its_first_difference() -> None:
    wrong = {ITEMS[2]["q"]: "Item 2 is a red clock from Lisbon."}
    with StubServer(ITEMS, wrong=wrong) as stub:
        text = ask(stub.url)["checks"][1]
    assert (text["status"], text["actual"]) == ("fail", "8 of 10 answers")
    assert text["evidence"]["question"] == ITEMS[2]["q"]
    assert text["evidence"]["word"] == 5
    assert "a blue clock" in text["evidence"]["expected"]
    assert "a red clock" in text["evidence"]["found"]


def test_white_space_around_an_answer_is_no_difference() -> None:
    with StubServer(ITEMS, wrong={ITEMS[1]["q"]: "  " + ITEMS[1]["a"] + "\n"}) as stub:
        assert ask(stub.url)["checks"][1]["status"] == "pass"


def test_foreign_drafts_while_idle_are_named() -> None:
    with StubServer(ITEMS, background=2) as stub:
        found = ask(stub.url)
    assert any("drafts were made while this test asked nothing" in line for line in found["foreign"])
    assert "Others were served meanwhile" in found["checks"][0]["hint"]


def test_requests_that_the_counters_do_not_hold_are_named() -> None:
    with StubServer(ITEMS) as other, StubServer(ITEMS) as stub:
        found = ask(stub.url, metrics_url=other.url + "/metrics")
    assert found["checks"][0]["actual"] == "no draft"
    assert any("only 0 of this test's" in line for line in found["foreign"])


def test_requests_of_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer(ITEMS) as stub:
        ask_one = stub.answer

        def twice(body: dict[str, Any]) -> dict[str, Any]:
            ask_one(body)
            return ask_one(body)

        monkeypatch.setattr(stub, "answer", twice)
        found = ask(stub.url)
    assert any("20 requests were counted, 10 were this test's" in line for line in found["foreign"])


def test_crash_in_the_middle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer(ITEMS) as stub:
        ask_one = stub.answer

        def crash(body: dict[str, Any]) -> dict[str, Any]:
            if len(stub.seen) == 4:
                stub.counts.update(drafts=0, accepted=0, requests=0)
                stub.born += 5.5
            return ask_one(body)

        monkeypatch.setattr(stub, "answer", crash)
        al = ask(stub.url)["checks"][0]
    assert (al["status"], al["actual"]) == ("fail", "restarted")


def test_several_engines_are_summed() -> None:
    with StubServer(ITEMS, engines=2) as stub:
        found = ask(stub.url)
    assert found["acceptance_length"] == 7.0
    assert found["checks"][0]["evidence"]["engines"] == 2


def test_text_is_compared_only_when_asked() -> None:
    with StubServer(ITEMS) as stub:
        assert [c["id"] for c in ask(stub.url, compare_text=False, check_id="serving.al")["checks"]] == ["serving.al"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((2.0, 7), (2.0, "configured")),
        ((2.0, 7, 7.771), (6.605, "85 % of this host's last good 7.771")),
        ((2.0, 7, 0, 5.0), (3.0, "60 % of the published 5.0")),
        ((4.0, 7, 4.0, 5.0), (4.0, "configured")),
        ((2.0, 4, 7.7, 6.5), (2.0, "configured")),  # figures of another K do not apply
    ],
)
def test_floor(arguments: tuple[Any, ...], expected: tuple[float, str]) -> None:
    assert acceptance.floor_of(*arguments) == expected


def test_floor_out_of_reach_is_an_input_error() -> None:
    with pytest.raises(DflashError, match="cannot be reached with 4 speculative tokens"):
        acceptance.floor_of(6.0, 4)


def test_actual_and_floor_are_compared_as_they_are_printed() -> None:
    seen = acceptance.Measurement(counters=metrics.Snapshot(drafts=100000.0, accepted=560460.0, draft_tokens=7e5))
    item = acceptance.judge("serving.al", seen, floor=6.605, origin="x", min_drafts=1, k=7, base_url="u")
    assert (item["actual"], item["status"]) == (6.605, "pass")


def test_hint_reads_the_positions() -> None:
    def hint(rates: list[float]) -> str:
        counters = metrics.Snapshot(
            drafts=1000.0, accepted=sum(rates) * 1000, draft_tokens=7000.0,
            per_position={n: rate * 1000 for n, rate in enumerate(rates)},
        )
        seen = acceptance.Measurement(counters=counters)
        return str(acceptance.judge(
            "serving.al", seen, floor=6.0, origin="x", min_drafts=1, k=7, base_url="u",
        )["hint"])

    assert "the window is dropped" in hint([0.9, 0.8, 0.3, 0.1, 0.01, 0, 0])
    assert "reads wrong layers" in hint([0.08, 0.01, 0, 0, 0, 0, 0])
    assert "That is chance" in hint([0.007, 0, 0, 0, 0, 0, 0])
    assert "window" not in hint([0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2])


def test_plans_never_repeat_and_never_tell_the_answer_before() -> None:
    for count in (2, 3, 24):
        plans = list(itertools.islice(acceptance.plans(count), 1500))
        assert len(set(plans)) == len(plans)
        assert all(plan.before and plan.item not in plan.before for plan in plans)
    assert {plan.item for plan in itertools.islice(acceptance.plans(24), 24)} == set(range(24))
    assert list(acceptance.plans(1)) == [acceptance.Plan(0, ())]


def test_items_need_questions() -> None:
    with pytest.raises(DflashError, match="needs a question"):
        ask("http://127.0.0.1:9", items=[{"a": "x"}])
    with pytest.raises(DflashError, match="needs a question"):
        ask("http://127.0.0.1:9", items=[])
