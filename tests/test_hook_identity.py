"""Which tokenizer and which end ids an engine has, read from files alone."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sampler_hook.identity import generation_eos, tokenizer_files
from tests.hook_fakes import config


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_tokenizer_is_known_by_what_is_in_its_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "merges.txt").write_bytes(b"a b")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_files(str(tmp_path)) == {"tokenizer.json": sha256(b"{}"), "merges.txt": sha256(b"a b")}


def test_a_tokenizer_that_is_nowhere_here_has_no_files() -> None:
    assert tokenizer_files("some/where-else") == {}
    assert tokenizer_files("not a name of a repository, nor a folder") == {}


def test_a_repository_is_looked_up_in_the_hubs_cache_and_nowhere_else(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_bytes(b"{}")
    code = """
import json, socket
def refuse(*_): raise AssertionError("a network call")
socket.socket.connect = socket.getaddrinfo = refuse
from sampler_hook.identity import tokenizer_files
print(json.dumps([tokenizer_files("some/model"), tokenizer_files("some/other")]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == [{"tokenizer.json": sha256(b"{}")}, {}]


@pytest.mark.parametrize(("eos", "expected"), [(2, {2}), ([2, 5], {2, 5}), (None, set())])
def test_end_ids_come_from_the_models_generation_config(tmp_path: Path, eos: object, expected: set[int]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert generation_eos(config(str(tmp_path)).model_config) == expected


def test_end_ids_come_from_the_folder_that_vllm_was_told(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert generation_eos(config("a/model", generation_config=str(tmp_path)).model_config) == {9}


def test_without_a_generation_config_the_models_own_is_asked(tmp_path: Path) -> None:
    assert generation_eos(config(str(tmp_path)).model_config) == {2}


def test_a_damaged_generation_config_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    assert generation_eos(config(str(tmp_path)).model_config) == set()
