"""jpaged, through `LLM` for batches and through its `Engine` for streaming.

Options: those of `LLM`; by default float32 and the limits that the other engines get. Rounds repeat their prompts, so a
prefix cache is off here, as it is for vLLM.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time


def load(model: str, options: dict) -> Jpaged:
    return Jpaged(model, **options)


class Jpaged:
    def __init__(self, model: str, **options):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # what is measured is this checkout
        import jax

        import jpaged

        self.version = f"jpaged {getattr(jpaged, '__version__', '')}, jax {jax.__version__}"
        self.params = jpaged.SamplingParams
        defaults = dict(dtype="float32", max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=2048)
        defaults["prefix_caching"] = False
        self.llm = jpaged.LLM(model=model, **{**defaults, **options})

    def sampling(self, request: dict):
        return self.params(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)

    def generate(self, requests: list[dict]) -> list[list[int]]:
        prompts = [r["prompt"] for r in requests]
        outputs = self.llm.generate(prompts, [self.sampling(r) for r in requests], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(self, request: dict) -> tuple[list[int], list[float]]:
        engine, ids, times = self.llm.engine, [], []
        engine.add_request(request["prompt"], self.sampling(request))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ids = list(output.outputs[0].token_ids)
                times += [time.perf_counter()] * (len(ids) - len(times))
        return ids, times
