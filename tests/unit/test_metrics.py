# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Counters are read from recorded text, by their exact names."""

from __future__ import annotations

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import metrics

# As a server with two engines answers, shortened; one label value holds what a label may hold.
RECORDED = r"""
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 18213.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \"b\", c=\"}\\"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 10.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
vllm:request_success_total{engine="1",finished_reason="abort",model_name="m"} 1.0
# TYPE vllm:request_success_created gauge
vllm:request_success_created{engine="0",finished_reason="stop",model_name="m"} 1.796062825431e+09
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 80.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7960628254e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 560.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 140.0
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="m"} 1.7960628254e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 542.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 1.08e+02
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="m"} 1.7960628254e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 19.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="10"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="0"} 1.7960628254e+09
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 200.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 50.0 1796062825431
not a sample
vllm:spec_decode_num_drafts_total{engine="2"} none
"""


def test_sums_over_engines_without_created_gauges() -> None:
    found = metrics.parse(RECORDED)
    assert (found.drafts, found.draft_tokens, found.accepted) == (100, 700, 650)
    assert found.per_position == {0: 99.0, 10: 7.0}
    assert (found.requests, found.running, found.engines) == (14, 4, 2)
    assert (found.prefix_queries, found.prefix_hits) == (200, 50)
    assert found.acceptance_length == 7.5
    assert found.rates == {0: 0.99, 10: 0.07}


def test_labels_hold_quotes_commas_and_braces() -> None:
    labels = [labels for name, labels, _value in metrics.samples(RECORDED) if name == metrics.RUNNING]
    assert labels[0] == {"engine": "0", "model_name": 'a "b", c="}\\'}


def test_a_server_without_speculation_has_no_drafts_rather_than_none_of_them() -> None:
    off = metrics.parse('vllm:num_requests_running{engine="0"} 0.0\n')
    idle = metrics.parse('vllm:spec_decode_num_drafts_total{engine="0"} 0.0\n')
    assert (off.speculates, off.acceptance_length) == (False, None)
    assert (idle.speculates, idle.acceptance_length, idle.rates) == (True, None, {})
    assert not metrics.parse("python_info 1.0\n").is_vllm


def test_difference() -> None:
    before = metrics.Snapshot(drafts=10, draft_tokens=70, accepted=20, per_position={0: 10}, requests=3, created=5)
    after = metrics.Snapshot(
        drafts=30, draft_tokens=210, accepted=60, per_position={0: 28, 1: 5}, requests=8, created=5,
    )
    found = metrics.difference(before, after)
    assert (found.drafts, found.draft_tokens, found.accepted, found.requests) == (20, 140, 40, 5)
    assert found.per_position == {0: 18, 1: 5}
    assert found.acceptance_length == 3.0


@pytest.mark.parametrize("change", [{"drafts": 5}, {"accepted": 1}, {"requests": 0}, {"created": 6.5}])
def test_a_server_started_anew_is_seen(change: dict[str, float]) -> None:
    values = {"drafts": 10, "accepted": 2, "requests": 3, "created": 5}
    with pytest.raises(metrics.CounterReset):
        metrics.difference(metrics.Snapshot(**values), metrics.Snapshot(**{**values, **change}))
