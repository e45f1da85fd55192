"""Owns `generate` and `stream`: the engine as a function of the params at hand."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jpaged.device.params import Params, check_params
from jpaged.engine.engine import Engine
from jpaged.engine.outputs import RequestOutput
from jpaged.engine.progress import Progress
from jpaged.engine.prompt import Prompt
from jpaged.host.config import EngineConfig
from jpaged.host.sampling_params import SamplingParams

MAX_ENGINES = 2  # kept at once: each holds a KV pool

Prompts = Prompt | Sequence[Prompt]

_engines: OrderedDict[Any, Engine] = OrderedDict()
_lock = threading.RLock()


def generate(
    params: Params,
    prompts: Prompts,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    progress: bool | None = None,
    **options: Any,
) -> list[RequestOutput]:
    """Generate for each prompt; results in the order of the prompts.

    params: from `jpaged.load`, or any tree like it. Its arrays are used where they lie.
    prompts: one prompt or a list of them; each is text, a list of token ids, or a list of chat messages.
    sampling: one `SamplingParams` for all, or one per prompt.
    progress: a progress bar on standard error; None shows it on a terminal, for work that takes a while.
    options: fields of `EngineConfig`.

    The engine (compiled programs, KV pool) is kept for the next call with the same options and params of the same
    config, tokenizer, shapes, dtypes and shardings: new weights cost no compilation. The params themselves are not
    kept. The two engines used last are kept; a third takes the place of the older one.

    Unless `sampling` says otherwise, 16 tokens are drawn at temperature 1.
    Raises ValueError for bad input, before anything is generated.
    """
    prompt_list = as_prompts(prompts)
    if not prompt_list:  # an engine is not built for nothing, but what was given is checked all the same
        check_params(params)
        EngineConfig.from_options(options)
        return []
    with _lock:
        engine = _engine_for(params, options | _able_to(sampling, options))
        try:
            return run(engine, prompt_list, sampling, progress=progress)
        finally:
            engine.weights = None


def stream(
    params: Params,
    prompts: Prompts,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    **options: Any,
) -> Iterator[RequestOutput]:
    """As `generate`, but yields a request's output each time that it grows; `outputs[0].text` is the text so far.

    Of several prompts, `request_id` is the prompt's place in the list, as text. Leaving the loop aborts the rest.
    """
    prompt_list = as_prompts(prompts)
    with _lock:
        engine = _engine_for(params, options | _able_to(sampling, options))
        # Requests are checked and queued now and not at the first `next`, so that an error comes from this call.
        try:
            ids = _add_all(engine, prompt_list, sampling, names=[str(i) for i in range(len(prompt_list))])
        except BaseException:
            engine.weights = None
            raise
    return _Stream(engine, ids)


class _Stream:
    """Outputs as they come. A generator would not do: one that was never begun has no `finally` to free the engine."""

    def __init__(self, engine: Engine, ids: list[str]):
        self._engine = engine
        self._unfinished = dict.fromkeys(ids)
        self._outputs: deque[RequestOutput] = deque()
        if not ids:
            engine.weights = None

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> RequestOutput:
        while not self._outputs and self._unfinished:
            try:
                self._outputs.extend(self._engine.step())
            except BaseException:
                self.close()
                raise
            for output in self._outputs:
                if output.finished:
                    del self._unfinished[output.request_id]
            if not self._unfinished:
                _let_go(self._engine)
        if not self._outputs:
            raise StopIteration
        return self._outputs.popleft()

    def close(self) -> None:
        """Abort what is unfinished. The engine may serve others once all is finished, so nothing else is touched."""
        self._outputs.clear()
        if self._unfinished:
            for request_id in self._unfinished:
                self._engine.abort(request_id)
            self._unfinished.clear()
            _let_go(self._engine)

    __del__ = close


def _let_go(engine: Engine) -> None:
    """Forget the weights of a stream that has ended, unless another thread has taken the engine already."""
    with _lock:
        if not engine.has_unfinished_requests():
            engine.weights = None


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "__array__"):
        return list(prompts) if getattr(prompts, "ndim", 1) > 1 else [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise ValueError(f"prompts must be text, token ids, messages or a list of these, got {type(prompts).__name__}")
    prompts = list(prompts)
    if prompts and not isinstance(prompts[0], (str, Sequence)) and not hasattr(prompts[0], "__len__"):
        return [prompts]  # a list of token ids
    if prompts and isinstance(prompts[0], Mapping):
        return [prompts]  # a list of messages
    return prompts


def run(
    engine: Engine,
    prompts: list[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    *,
    progress: bool | None,
) -> list[RequestOutput]:
    """Serve these prompts to their end. If anything goes wrong, none of them stays behind in the engine."""
    ids = _add_all(engine, prompts, sampling, names=None)
    finished: dict[str, RequestOutput] = {}
    show = sys.stderr is not None and sys.stderr.isatty() if progress is None else progress
    try:
        with Progress(len(ids), at_once=progress is True) if show else _Silent() as bar:
            while engine.has_unfinished_requests():
                before = engine.stats.num_output_tokens
                for output in engine.step():
                    if output.finished:
                        finished[output.request_id] = output
                bar.update(len(finished), engine.stats.num_output_tokens - before)
    except BaseException:
        for request_id in ids:
            engine.abort(request_id)
        raise
    return [finished[request_id] for request_id in ids]


class _Silent:
    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def update(self, num_finished: int, new_tokens: int) -> None:
        pass


def _add_all(
    engine: Engine,
    prompts: list[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    names: list[str] | None,
) -> list[str]:
    if sampling is None or isinstance(sampling, SamplingParams):
        each = [sampling] * len(prompts)
    else:
        if not isinstance(sampling, Sequence):
            raise ValueError(f"sampling must be SamplingParams or a list of them, got {type(sampling).__name__}")
        each = list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(each)} SamplingParams: give one, or one each")
        for one in each:
            if not isinstance(one, SamplingParams):
                raise ValueError(f"sampling must be SamplingParams or a list of them, got {type(one).__name__}")
    _check_idle(engine)
    ids: list[str] = []
    try:
        for i, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            ids.append(engine.add_request(prompt, one, request_id=names[i] if names else None))
    except BaseException:
        for request_id in ids:
            engine.abort(request_id)
        raise
    return ids


def _able_to(sampling: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that an engine needs for what is asked for: scores of prompts, and the widest of the beam searches
    (the next power of two, so that few engines are built)."""
    given = sampling if isinstance(sampling, Sequence) else [sampling]
    each = [one for one in given if isinstance(one, SamplingParams)]
    needed: dict[str, Any] = {}
    widest = max([one.num_beams for one in each], default=1)
    if widest > 1:
        rows = options.get("max_num_seqs")
        rounded = 1 << (widest - 1).bit_length()
        needed["max_num_beams"] = max(widest, min(rounded, rows)) if isinstance(rows, int) else rounded
    if any(one.prompt_logprobs is not None for one in each):
        needed["prompt_logprobs"] = True
    return {name: value for name, value in needed.items() if name not in options}


def _engine_for(params: Params, options: Mapping[str, Any]) -> Engine:
    check_params(params)
    config = EngineConfig.from_options(options)
    leaves, structure = jax.tree.flatten(params.weights)
    key = (
        params.config,
        params.tokenizer,
        config,
        structure,
        jax.config.jax_default_matmul_precision,  # what programs are compiled with
        tuple((leaf.shape, str(leaf.dtype), getattr(leaf, "sharding", None)) for leaf in leaves),
    )
    engine = _engines.pop(key, None)
    if engine is None:
        while len(_engines) >= MAX_ENGINES:
            _engines.popitem(last=False)
        engine = Engine(params, config)
    _engines[key] = engine
    _check_idle(engine)
    engine.weights = params.weights
    return engine


def _check_idle(engine: Engine) -> None:
    if engine.has_unfinished_requests():
        raise ValueError("this engine is in use: finish or close the running stream first")
