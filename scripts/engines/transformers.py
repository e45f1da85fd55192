"""Hugging Face transformers: `generate` over static batches of 16 in order of arrival, padded on the left.

Options: `dtype` (float32), `batch` (16), `attn` (sdpa).
"""

from __future__ import annotations

import os
import time

os.environ["HF_HUB_OFFLINE"] = "1"


def load(model: str, options: dict) -> Transformers:
    return Transformers(model, **options)


class Transformers:
    def __init__(self, model: str, dtype: str = "float32", batch: int = 16, attn: str = "sdpa"):
        import torch
        import transformers

        self.torch, self.batch = torch, batch
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.set_grad_enabled(False)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation=attn
        ).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

        class Clock(transformers.generation.streamers.BaseStreamer):
            """Notes when each token arrives; the prompt comes first."""

            def __init__(self):
                self.times = []

            def put(self, value):
                self.times.append(time.perf_counter())

            def end(self):
                pass

        self.clock = Clock

    def generate(self, requests: list[dict]) -> list[list[int]]:
        outputs = []
        for start in range(0, len(requests), self.batch):
            outputs += self._static_batch(requests[start : start + self.batch])
        return outputs

    def _static_batch(self, requests: list[dict]) -> list[list[int]]:
        # A batch runs for as long as its longest answer: what a static batch costs is part of the comparison.
        width = max(len(r["prompt"]) for r in requests)
        ids = self.torch.zeros((len(requests), width), dtype=self.torch.long)
        mask = self.torch.zeros_like(ids)
        for row, request in enumerate(requests):
            prompt = request["prompt"]
            ids[row, width - len(prompt) :] = self.torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(r["max_tokens"] for r in requests)
        out = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
        return [out[row, width : width + r["max_tokens"]].tolist() for row, r in enumerate(requests)]

    def stream(self, request: dict) -> tuple[list[int], list[float]]:
        clock = self.clock()
        ids = self.torch.tensor([request["prompt"]])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=self.torch.ones_like(ids),
            max_new_tokens=request["max_tokens"],
            do_sample=False,
            streamer=clock,
        )
        return out[0, ids.shape[1] :].tolist(), clock.times[1:]
