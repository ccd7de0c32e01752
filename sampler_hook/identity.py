"""Who the engine is: its model, its tokenizer's files, the ids that end a sequence. Reads files, never the network."""

import hashlib
import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from sampler_hook import adapters
from sampler_hook.attention import layers
from sparseety.clock import Clock
from sparseety.records import EngineStart, TokenizerIdentity

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tekken.json",
)


def engine_start(
    config: Any, *, version: str, capture: Collection[str], expected: list[str], attached: list[str], clock: Clock
) -> EngineStart:
    """What a VllmConfig says about the engine."""
    model = config.model_config
    return EngineStart(
        ts=clock(),
        vllm=version,
        model=str(model.model),
        tokenizer=TokenizerIdentity(
            name=str(model.tokenizer),
            mode=str(model.tokenizer_mode),
            files=tokenizer_files(str(model.tokenizer), model.tokenizer_revision),
            vocab_size=int(model.get_vocab_size()),
        ),
        served_names=adapters.served_names(model),
        max_model_len=int(model.max_model_len),
        reasoning_parser=adapters.reasoning_parser(config),
        data_parallel_rank=adapters.data_parallel_rank(config),
        hooks_expected=expected,
        hooks_attached=attached,
        capture=sorted(capture),
        block_size=adapters.block_size(config),
        attention=layers(adapters.text_config(model)),
        dtype=_dtype(model),
        batch_invariant=os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0",
    )


def _dtype(model: Any) -> str | None:
    dtype = getattr(model, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def tokenizer_files(name: str, revision: str | None = None) -> dict[str, str]:
    """sha256 of each file of a tokenizer that is on this machine, by file name."""
    found = ((file, local_file(name, file, revision)) for file in TOKENIZER_FILES)
    return {file: digest for file, path in found if path and (digest := _sha256(path))}


def generation_eos(model_config: Any) -> frozenset[int]:
    """The end ids of the model's generation config.

    vLLM adds them to a request's stop_token_ids before the engine sees it; this tells them from the user's own. Where
    the file cannot be found here, the model's own config is asked, and in the worst case they count as the user's.
    """
    source = model_config.generation_config
    if source in ("auto", "vllm"):  # as in vLLM: "vllm" gives up its sampling defaults, not its end ids
        source = getattr(model_config, "hf_config_path", None) or model_config.model
    path = local_file(str(source), "generation_config.json", getattr(model_config, "revision", None))
    try:
        ids = json.loads(path.read_bytes()).get("eos_token_id") if path else None
    except (OSError, ValueError):
        ids = None
    if path is None:
        ids = getattr(getattr(model_config, "hf_config", None), "eos_token_id", None)
    if isinstance(ids, int):
        return frozenset({ids})
    return frozenset(id_ for id_ in ids if isinstance(id_, int)) if isinstance(ids, Iterable) else frozenset()


def local_file(name: str, file: str, revision: str | None = None) -> Path | None:
    """A file of a model that is a folder, or a repository in the hub's cache on this machine."""
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(name, file, revision=revision)
    except (ImportError, ValueError):  # no hub library here, or a name that is no repository
        return None
    return Path(path) if isinstance(path, str) else None  # it may also know that there is no such file


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
