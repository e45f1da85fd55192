"""Owns `Flight`: a step that was started on the device, until its tokens are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jpaged.device.adjusted_sampler import Told
from jpaged.device.sampler import Sampled
from jpaged.engine.compile import CompiledSteps
from jpaged.engine.processors import process
from jpaged.engine.tops import take_prompt_tops, take_tops
from jpaged.host.adjustments import pack_adjustments
from jpaged.host.batch import Batch
from jpaged.host.config import EngineConfig
from jpaged.host.request import RequestFailed
from jpaged.host.row_table import RowTable
from jpaged.host.scheduler import BatchPlan


class Flight(NamedTuple):
    """`plan` with its rows in the order of `batch`, and what was drawn for them. failures: of requests that cannot go
    on, whatever was drawn."""

    plan: BatchPlan
    batch: Batch
    sampled: Sampled
    told: Told | None = None  # of adjusted logits
    prompt_tops: tuple[jax.Array, jax.Array] | None = None
    failures: Sequence[RequestFailed] = ()

    def adjusted(
        self, steps: CompiledSteps, table: RowTable, config: EngineConfig, token_ids: jax.Array | None
    ) -> Flight:
        """With tokens drawn again where requests ask for something that the step itself does not do. `token_ids` are
        those of the step before, if they are still on the device. Raises RequestFailed, from what a `logits_processor`
        raised."""
        scores, sampled = self.sampled.scores, self.sampled._replace(scores=None, prompt_tops=None)
        found = self._replace(sampled=sampled, prompt_tops=self.sampled.prompt_tops)
        failures: list[RequestFailed] = []
        # Made while the device computes: masks take the host's time.
        adjustments = pack_adjustments(
            self.plan.rows,
            table,
            len(self.batch.context_lens),
            steps.history_len,
            steps.vocab_size,
            ahead=token_ids is not None,
            with_histories=config.logits_processor is not None,
            failures=failures,
        )
        if adjustments is None or scores is None:
            return found
        scores = process(self.plan.rows, scores, self.batch.sampling.banned_ids)
        drawn, told = steps.adjust(sampled, scores, self.batch, adjustments, token_ids)
        sampled = sampled._replace(token_ids=drawn.token_ids, logprobs=drawn.logprobs)
        return found._replace(sampled=sampled, told=told, failures=failures)

    def land(self) -> Any:  # `Sampled`, of NumPy arrays
        """Waits for the step; what was drawn, on the host. What requests want to know beside it, they are given."""
        sampled = jax.device_get(self.sampled)
        if self.told is not None:
            take_tops(self.plan.rows, self.told)
        if self.prompt_tops is not None:
            take_prompt_tops(self.plan.rows, self.prompt_tops)
        return sampled
