"""Owns `LLM`: the engine under the signature that users of other engines know."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from jpaged.checkpoint import load
from jpaged.device.params import Params
from jpaged.engine.api import Prompts, as_prompts, run
from jpaged.engine.engine import Engine
from jpaged.engine.outputs import RequestOutput
from jpaged.host.config import EngineConfig
from jpaged.host.sampling_params import SamplingParams


class LLM:
    """A model and its engine.

    model: a path, a Hub id, or `Params`. dtype: of weights and KV cache (float32 on a CPU, bfloat16 on a GPU).
    revision: of a Hub id. Other options are fields of `EngineConfig`.
    """

    def __init__(self, model: str | Params, *, dtype: Any = None, revision: str | None = None, **options: Any):
        known = {field.name for field in fields(EngineConfig)} - {"dtype"}
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known | {"dtype", "revision"}), n=1)
                hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(sorted(known))}"
                raise ValueError(f"LLM has no option {name!r}: {hint}")
        config = EngineConfig(**options)  # before the weights are read, so that a bad option costs no time
        if isinstance(model, Params):
            if dtype is not None or revision is not None:
                raise ValueError("dtype and revision say how to load a model, but these are Params already")
            params = model
        else:
            params = load(model, dtype=dtype, revision=revision)
        self.engine = Engine(params, config)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Results in the order of the prompts; `use_tqdm` is the progress bar (None: on a terminal)."""
        return run(self.engine, as_prompts(prompts), sampling_params, progress=use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """The next message of one conversation, or of each of several."""
        conversations = as_prompts(messages)
        for one in conversations:
            if not (isinstance(one, Sequence) and len(one) and isinstance(one[0], Mapping)):
                raise ValueError(f"chat takes messages, such as [{{'role': 'user', 'content': ...}}], got {one!r}")
        return run(self.engine, conversations, sampling_params, progress=use_tqdm)
