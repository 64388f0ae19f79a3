# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a server is started with: the same text for the same input, and nothing that must not be served."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml

from ansible_collections.dflash.fleet.plugins.module_utils import launch
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

ROOT = "/var/tmp/dflash-01234567"
PLACES: dict[str, Any] = {
    "root": ROOT, "instance": "main", "release_dir": ROOT + "/releases/abc", "layer_dir": ROOT + "/layers/def",
    "target_dir": "/models/target", "drafter_dir": "/models/drafter", "k": 7, "served_name": "m",
}


def render(inputs: dict[str, Any] | None = None, **places: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    given = {"dflash_serve_port": 8000, "vllm_build_device": "cuda", **(inputs or {})}
    out = launch.render(given, **{**PLACES, **places})
    return yaml.safe_load(out["serve.yaml"]), json.loads(out["argv.json"])


def test_the_whole_of_a_cpu_server() -> None:
    serve, argv = render({"vllm_build_device": "cpu", "dflash_serve_ready_timeout": 600})
    assert serve == {
        "model": "/models/target", "served-model-name": "m", "host": "127.0.0.1", "port": 8000, "enforce-eager": True,
        "generation-config": "vllm", "max-num-seqs": 4,
        "speculative-config": {"method": "dflash", "model": "/models/drafter", "num_speculative_tokens": 7},
    }
    assert argv["argv"] == [ROOT + "/releases/abc/venv/bin/vllm", "serve", "--config", "@DEPLOYMENT@/serve.yaml"]
    assert argv["cwd"] == ROOT + "/instances/main/run"
    assert argv["env_file"] == ROOT + "/etc/main.env"
    assert argv["base_url"] == "http://127.0.0.1:8000"
    env = argv["env"]
    assert env["DFLASH_INSTANCE"] == ROOT + "/instances/main"
    assert env["VLLM_RPC_BASE_PATH"] == env["TMPDIR"] == argv["cwd"]
    assert env["PATH"].startswith(ROOT + "/releases/abc/venv/bin:" + ROOT + "/layers/def/venv/bin:")
    assert (env["HF_HUB_OFFLINE"], env["VLLM_CPU_KVCACHE_SPACE"]) == ("1", "1")
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "600"
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HOME", "HF_HOME"):
        assert env[name].startswith(ROOT + "/cache/abc"), "caches lie outside the release and belong to it alone"
    assert all(isinstance(value, str) for value in env.values())


def test_equal_input_gives_equal_text() -> None:
    one = {"dflash_serve_port": 1, "dflash_serve_engine_args": {"b": 1, "a": {"y": 1, "x": 2}}}
    two = {"dflash_serve_engine_args": {"a": {"x": 2, "y": 1}, "b": 1}, "dflash_serve_port": 1}
    assert launch.render(one, **PLACES) == launch.render(two, **PLACES)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"enable_prefix_caching": False}, {"no-enable-prefix-caching": True}),
        ({"no_enable_prefix_caching": False}, {"enable-prefix-caching": True}),
        ({"enable-prefix-caching": True}, {"enable-prefix-caching": True}),
        ({"enforce_eager": None}, {}),
        ({"--max-model-len": 1024}, {"max-model-len": 1024}),
        ({"limit-mm-per-prompt": {"image": 0}}, {"limit-mm-per-prompt": {"image": 0}}),
        ({"allowed-origins": ["a", "b: c"]}, {"allowed-origins": ["a", "b: c"]}),
        ({"gpu-memory-utilization": 0.9}, {"gpu-memory-utilization": 0.9}),
    ],
)
def test_engine_arguments(given: dict[str, Any], expected: dict[str, Any]) -> None:
    serve, _argv = render({"dflash_serve_engine_args": given})
    ours = {"model", "served-model-name", "host", "port", "speculative-config"}
    assert {key: value for key, value in serve.items() if key not in ours} == expected


def test_user_overrides_what_a_cpu_gets_by_default() -> None:
    given = {"enforce-eager": False, "generation-config": "auto", "max_num_seqs": None}
    serve, argv = render({
        "vllm_build_device": "cpu", "dflash_serve_engine_args": given,
        "dflash_serve_environment": {"VLLM_CPU_KVCACHE_SPACE": 4},
    })
    assert serve["no-enforce-eager"] is True
    assert "enforce-eager" not in serve
    assert "max-num-seqs" not in serve
    assert serve["generation-config"] == "auto"
    assert argv["env"]["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_speculative_config_takes_further_keys() -> None:
    serve, _argv = render({"dflash_serve_speculative_config": {
        "disable_eagle_block_drop": True, "attention_backend": "FLASH_ATTN", "revision": None,
    }})
    assert serve["speculative-config"] == {
        "method": "dflash", "model": "/models/drafter", "num_speculative_tokens": 7,
        "disable_eagle_block_drop": True, "attention_backend": "FLASH_ATTN",
    }


def test_without_drafter() -> None:
    serve, _argv = render(drafter_dir=None)
    assert "speculative-config" not in serve


def test_runner_is_asked_for_only_where_it_is_needed() -> None:
    assert render(runner="v2")[1]["env"]["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in render()[1]["env"]


def test_trust_remote_code_is_off_unless_said() -> None:
    assert "trust-remote-code" not in render()[0]
    assert render({"dflash_serve_trust_remote_code": True})[0]["trust-remote-code"] is True


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"dflash_serve_host": "0.0.0.0"}, "answer anybody on 0.0.0.0, without an API key"),
        ({"dflash_serve_host": "::"}, "without an API key"),
        ({"dflash_serve_host": "gpu1.example"}, "without an API key"),
        ({"dflash_serve_port": "8000"}, "no TCP port"),
        ({"dflash_serve_port": 70000}, "no TCP port"),
        ({"dflash_serve_port": True}, "no TCP port"),
        ({"vllm_build_device": "rocm"}, "rocm is no device"),
        ({"dflash_serve_engine_args": {"port": 1}}, "Set dflash_serve_port"),
        ({"dflash_serve_engine_args": {"served_model_name": "x"}}, "Set dflash_serve_served_model_name"),
        ({"dflash_serve_engine_args": {"api-key": "x"}}, "Set dflash_serve_api_key_file"),
        ({"dflash_serve_engine_args": {"speculative-config.method": "x"}}, "Set dflash_serve_speculative_config"),
        ({"dflash_serve_engine_args": {"compilation-config.mode": 3}}, "not dotted"),
        ({"dflash_serve_engine_args": {"max_model_len": 1, "max-model-len": 2}}, "same option"),
        ({"dflash_serve_engine_args": {"disable_log_stats": True}}, "hides the counters"),
        ({"dflash_serve_engine_args": {"max-num-seqs": 512, "max-num-batched-tokens": 2048}}, "to 4096"),
        ({"dflash_serve_engine_args": {"x": math.inf}}, "finite"),
        ({"dflash_serve_engine_args": {"x": {"y": object()}}}, "object cannot be written"),
        ({"dflash_serve_speculative_config": {"num_speculative_tokens": 9}}, "Set dflash_serve_num_speculative_tokens"),
        ({"dflash_serve_speculative_config": {"method": "eagle3"}}, "always dflash"),
        ({"dflash_serve_speculative_config": {"rejection_sample_method": "synthetic"}}, "keeps the target's text"),
        ({"dflash_serve_speculative_config": {"synthetic_acceptance_length": 6.0}}, "keeps the target's text"),
        ({"dflash_serve_environment": {"HF_TOKEN": "x"}}, "looks like a secret"),
        ({"dflash_serve_environment": {"VLLM_API_KEY": "x"}}, "looks like a secret"),
        ({"dflash_serve_environment": {"TMPDIR": "/x"}}, "set by this collection"),
        ({"dflash_serve_environment": {"DFLASH_INSTANCE": "/x"}}, "set by this collection"),
        ({"dflash_serve_environment": {"A B": "x"}}, "no name of an environment variable"),
        ({"dflash_serve_environment": {"A": True}}, "is not text"),
    ],
)
def test_refusals(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(DflashError) as caught:
        render(inputs)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "inputs", [{"dflash_serve_api_key_file": "/etc/key"}, {"dflash_serve_allow_open_address": True}],
)
def test_an_open_address_with_a_key_or_on_purpose(inputs: dict[str, Any]) -> None:
    serve, argv = render({"dflash_serve_host": "0.0.0.0", **inputs})
    assert serve["host"] == "0.0.0.0"
    assert argv["base_url"] == "http://127.0.0.1:8000"
    assert argv.get("api_key_file") == inputs.get("dflash_serve_api_key_file")


def test_the_token_budget_may_be_used_up() -> None:
    full = {"max-num-seqs": 256, "max-num-batched-tokens": 2048}
    assert render({"dflash_serve_engine_args": full})[0]["max-num-seqs"] == 256
    with pytest.raises(DflashError, match="= 2048 exceeds max-num-batched-tokens 2047"):
        render({"dflash_serve_engine_args": {**full, "max-num-batched-tokens": 2047}})


def test_no_speculative_token_is_no_speculation() -> None:
    with pytest.raises(DflashError, match="0 speculative tokens"):
        render(k=0)


def test_sockets_need_a_short_folder() -> None:
    assert launch.run_dir("/" + "r" * 50, "main") == "/" + "r" * 50 + "/instances/main/run"
    with pytest.raises(DflashError, match="70 are the most"):
        launch.run_dir("/" + "r" * 60, "main")


@pytest.mark.parametrize("name", ["", "..", "a/b", "Main", ".x", "a" * 33, "a b", "a\n"])
def test_instance_names(name: str) -> None:
    with pytest.raises(DflashError, match="instance name"):
        launch.instance_dir("/r", name)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"), ("[::1]", "http://[::1]:80"), ("localhost", "http://localhost:80"),
        ("10.0.0.7", "http://10.0.0.7:80"),
    ],
)
def test_base_url(host: str, url: str) -> None:
    assert launch.base_url(host, 80) == url


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1e-05, "b": 1e20, "c": -0.5, "d": 3.0}, {"yes": "no", "on": True, "null": None, "1": "1"},
        {"text": 'a: "b" #c\n\t\u00e4\u2028 %s $X {{ x }}'},
        {"deep": {"deeper": {"list": [1, [2, {"k": "v"}]], "none": {}}}},
        {"empty": [], "date": "2026-11-30", "octal": "0o17", "number": "1_000", "spaced key": 1, "tilde": "~"},
    ],
)
def test_yaml_reads_back_as_it_was(value: dict[str, Any]) -> None:
    assert yaml.safe_load(launch.to_yaml(value, "x")) == value
