"""Models and helpers of the engine's tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jpaged
from jpaged.checkpoint.loader import FAMILIES
from jpaged.device.params import Params, weight_shapes
from jpaged.engine.engine import Engine
from jpaged.engine.outputs import RequestOutput
from jpaged.host.page_pool import PagePool
from jpaged.host.sampling_params import SamplingParams
from jpaged.models.config import ModelConfig

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
# Those whose architecture is supported; a reference may lie there before its family does.
LOADABLE = sorted(
    path.parent.name
    for path in CHECKPOINTS.glob("*/config.json")
    if json.loads(path.read_text())["architectures"][0] in FAMILIES
)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "page_size": 4, "num_pages": 65}


@functools.cache
def tiny(name: str) -> Params:
    return jpaged.load(CHECKPOINTS / name, dtype="float32")


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(CHECKPOINTS / name / "ref.npz") as stored:
        return dict(stored)


def build(params: Params, **options: Any) -> Engine:
    """An engine of small limits that compiles a shape when it first meets it."""
    return Engine(params, **(LIMITS | {"warm_up": False, "check_integrity": True} | options))


def of_few_shapes(engine: Engine, decode: int = 1, mixed: int = 1) -> Engine:
    """The engine with its largest shapes alone, so many of each kind: fewer to compile, where other tests have all."""
    buckets = engine._buckets
    engine._buckets = buckets._replace(decode=buckets.decode[-decode:], mixed=buckets.mixed[-mixed:])
    return engine


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Steps to the end; the finished outputs by request id."""
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished


def serve(engine: Engine, prompts: Sequence[Any], sampling: Any = GREEDY) -> list[RequestOutput]:
    """Serves prompts together; their finished outputs in order."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    ids = [engine.add_request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    finished = finish(engine)
    return [finished[request_id] for request_id in ids]


def tokens(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """The generated tokens of every sample."""
    return [sample.token_ids for output in outputs for sample in output.outputs]


def assert_idle(engine: Engine) -> None:
    """Nothing is queued or running and every page is free. Tidies up first, so that one failure stays one."""
    left = list(engine._groups)
    for request_id in left:
        engine.abort(request_id)
    assert not left, f"a test left requests behind: {left}"
    assert not engine.has_unfinished_requests() and not engine._samples
    assert engine.num_free_pages == engine.num_pages, "pages are lost"


@contextmanager
def small_pool(engine: Engine, num_pages: int) -> Iterator[None]:
    """Leaves the engine `num_pages` pages, and reserves none of them for those that run, so that they are preempted. A
    pool that is built smaller would have other shapes to compile."""
    pool, num_reserved = engine._pool, engine._scheduler._num_reserved
    engine._scheduler._num_reserved = 0
    held = pool.acquire(pool.num_free - num_pages)
    pool.check = lambda tables: PagePool.check(pool, [*tables, held])
    try:
        yield
    finally:
        engine._scheduler._num_reserved = num_reserved
        del pool.check
        pool.release(held)


def parrot(tokenizer: Any, script: Sequence[int], eos_token_id: int = 2) -> Params:
    """A model that says `script`, then the end of text, after any prompt that ends with no token of the script.

    Attention and MLP add nothing. The embedding of the script's token i points along axis i + 1, that of all other
    tokens along axis 0, and the head of each next token reads the axis of the one before it.
    """
    assert len(set(script)) == len(script), "the tokens of a script must be distinct"
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=tokenizer.vocab_size,
        d_model=32,
        d_ff=8,
        num_layers=1,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=256,
        eos_token_ids=(eos_token_id,),
    )
    assert len(script) < config.d_model

    def filled(name: str, shape: Any) -> Any:
        if isinstance(shape, tuple) and shape and isinstance(shape[0], dict):
            return tuple({key: filled(key, value) for key, value in layer.items()} for layer in shape)
        return jnp.asarray(np.ones(shape, np.float32) if name.endswith("norm") else np.zeros(shape, np.float32))

    weights = {name: filled(name, shape) for name, shape in weight_shapes(config).items()}
    embed = np.zeros((config.vocab_size, config.d_model), np.float32)
    embed[:, 0] = 1
    for i, token_id in enumerate(script):
        embed[token_id] = np.eye(config.d_model)[i + 1]
    head = np.zeros((config.d_model, config.vocab_size), np.float32)
    for axis, token_id in enumerate([*script, eos_token_id]):
        head[axis, token_id] = 100
    return Params({**weights, "embed": jnp.asarray(embed), "head": jnp.asarray(head)}, config, tokenizer)


def teach(engine: Engine, text: str) -> list[int]:
    """Makes a parrot's engine say `text`; returns its tokens, the end of text included."""
    script = engine.tokenizer.encode_continuation(text)
    engine.weights = parrot(engine.tokenizer, script).weights
    return [*script, 2]
