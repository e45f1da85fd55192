"""Owns `Engine`: requests in, tokens out, one `step` at a time."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import jax
import numpy as np

from jpaged.device.kv_pages import KVPages, make_kv_pages
from jpaged.device.params import Params, check_params
from jpaged.engine.blueprint import Blueprint
from jpaged.engine.compile import compile_counter, own_settings, use_compilation_cache
from jpaged.engine.constraints import Constraints
from jpaged.engine.flight import Flight
from jpaged.engine.group import Group, Sample
from jpaged.engine.outputs import RequestOutput
from jpaged.engine.prompt import Prompt, to_token_ids
from jpaged.engine.samples import detokenizer_of, fork_of, samples_of
from jpaged.engine.session import Session
from jpaged.engine.swap_store import SwapStore, make_swap_space
from jpaged.host.batch import pack
from jpaged.host.beam_search import BeamSearch
from jpaged.host.config import EngineConfig
from jpaged.host.limits import Limits
from jpaged.host.metrics import EngineStats
from jpaged.host.page_pool import PagePool
from jpaged.host.request import Request, RequestFailed, RequestStatus
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import BatchPlan, Scheduler
from jpaged.host.snapshot import snapshot


class Engine:
    """Generates with `params` under `config`; keyword options are fields of `EngineConfig`.

    `add_request` queues, `step` computes the next tokens of what is queued, `abort` ends a request early; `stats`
    counts. Not for use from several threads at once.

    Raises ValueError if the memory does not hold one sequence of `max_model_len` tokens.
    """

    def __init__(self, params: Params, config: EngineConfig | None = None, **options: Any):
        if config is not None and not isinstance(config, EngineConfig):
            raise ValueError(f"config must be an EngineConfig, got {type(config).__name__}: or give options by keyword")
        if options:
            config = EngineConfig.from_options((asdict(config) if config else {}) | options)
        self.config = config = config or EngineConfig()
        check_params(params)
        self.model_config = params.config
        self.tokenizer = params.tokenizer
        use_compilation_cache(config.compilation_cache_dir)
        self._compile_counter = compile_counter()
        compiles, began = self._compile_counter.compiles, time.perf_counter()
        plan = Blueprint.of(params, config)
        self.max_model_len = plan.max_model_len
        self._limits = plan.limits
        self._buckets = plan.buckets
        self._constraints = Constraints(params.tokenizer, params.config.vocab_size, plan.limits.eos_token_ids)
        swap_space = make_swap_space(config, plan.page_bytes)
        self._pool = PagePool(plan.num_pages, config.page_size, swap_space)
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=plan.limits.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            step_size=plan.buckets.step_size,
            prefix_caching=config.prefix_caching,
            sliding_window=params.config.sliding_window,
        )
        self._leaves_seen: list[weakref.ref] = []
        self.weights = params.weights
        self._steps = plan.compiled_steps(params, with_swap=swap_space is not None)
        self._swap_store = None if swap_space is None else SwapStore(swap_space, *plan.page_like(), config.swap_dir)
        self._make_kv_pages = partial(make_kv_pages, params.config, plan.num_pages, config.page_size, plan.kv_dtype)
        with own_settings():
            self._kv_pages: KVPages = self._make_kv_pages()
        if config.warm_up:
            # In the background, one processor stays free for what is served meanwhile.
            self._steps.warm_up(max((os.cpu_count() or 1) - (config.warm_up == "background"), 1))
        if config.warm_up is True:
            self._steps.wait_until_warm()
            with own_settings():
                self._kv_pages = self._steps.run_each_once(self.weights, self._kv_pages)
        self.warm_up_seconds = time.perf_counter() - began
        self.warm_up_compiles = self._compile_counter.compiles - compiles
        self.stats = EngineStats()
        self._groups: dict[str, Group] = {}
        self._samples: dict[str, Sample] = {}
        self._failures: list[RequestFailed] = []  # not raised yet
        self._ready: list[RequestOutput] = []  # for the next `step` to return
        self._names = itertools.count()
        self._detokenizer = partial(detokenizer_of, params.tokenizer)
        self._in_flight: Flight | None = None  # started before the step before it was read

    @property
    def weights(self) -> Any:
        """What the next step computes with. Other arrays may take their place at any time, and empty the prefix cache
        then; None lets go of them until the next ones come."""
        return self._weights

    @weights.setter
    def weights(self, weights: Any) -> None:
        self._weights = weights
        leaves = jax.tree.leaves(weights)
        seen = self._leaves_seen
        if leaves and not (len(seen) == len(leaves) and all(a() is b for a, b in zip(seen, leaves, strict=True))):
            self._scheduler.forget()
            self._leaves_seen = [weakref.ref(leaf) for leaf in leaves]

    def add_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt: text, token ids, or chat messages (a list of `{"role": ..., "content": ...}`).

        priority: the lower, the sooner it is served, before others that came earlier; equal ones in the order of
        arrival. A unit of it is worth 1,000 places in that order, so that none waits for ever.

        Returns the request's id. Raises ValueError for a prompt or sampling that cannot be served; nothing is queued
        then.
        """
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling must be SamplingParams, got {type(sampling).__name__}")
        text, token_ids = to_token_ids(prompt, self.tokenizer, self.model_config.vocab_size)
        token_ids = token_ids[-(sampling.truncate_prompt_tokens or 0) :]
        self._limits.check(token_ids, sampling)
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"request_id must be text or None, got {request_id!r}")
        if request_id is None:
            request_id = self._new_name()
        if self._knows(request_id):
            raise ValueError(f"request_id {request_id!r} is in use: give each unfinished request its own")
        if isinstance(priority, bool) or not isinstance(priority, (int, np.integer)):
            raise ValueError(f"priority must be a whole number (the lower, the sooner), got {priority!r}")
        salt = self._limits.cache_salt(token_ids, sampling)
        constraint = self._constraints.of(sampling)
        requests = samples_of(request_id, token_ids, sampling, self._limits, int(priority), salt, constraint)
        self._add(request_id, text, requests)
        return request_id

    def prepare(self, sampling: SamplingParams) -> None:
        """Compile the shape that a text is to have, so that `add_request` finds it compiled. From any thread.

        Raises ValueError for one that no text can have.
        """
        self._constraints.of(sampling)

    def fork(self, request_id: str, n: int = 1, *, index: int = 0) -> list[str]:
        """Branch `n` new requests off a sample of an unfinished one: they begin with its prompt and the tokens that it
        has so far, on the same pages, and go on with draws of their own.

        index: which of the request's samples. Returns the ids of the new requests, each of one sample, whose outputs
        hold the tokens of before, too. Raises ValueError where there is nothing that could go on.
        """
        group = self._groups.get(request_id) if isinstance(request_id, str) else None
        if group is None:
            raise ValueError(f"request_id {request_id!r} cannot be forked: there is no such unfinished request")
        parent = group.to_fork(n, index)
        names = []
        for _ in range(n):
            names.append(self._new_name())
            self._add(names[-1], group.prompt, [fork_of(parent, names[-1])])
        return names

    def _add(self, request_id: str, prompt: str | None, requests: list[Request]) -> None:
        """Queue the samples of one request."""
        first = requests[0]
        beams = BeamSearch(first.sampling, first.ending_ids, first.max_tokens) if first.is_beam else None
        # A list of its own: callers get it.
        group = Group(request_id, prompt, list(first.prompt_token_ids), [], len(requests), beams)
        group.samples = [
            Sample(request, self._detokenizer(request), index, group) for index, request in enumerate(requests)
        ]
        self._groups[request_id] = group  # first, so that whatever comes, an abort finds it
        try:
            for sample in group.samples:
                self._samples[sample.request.request_id] = sample
                self._scheduler.add(sample.request)
        except BaseException:
            self.abort(request_id)
            raise

    def _knows(self, request_id: str) -> bool:
        """Whether this request is unfinished, or nobody was told yet that it has ended."""
        return request_id in self._groups or any(output.request_id == request_id for output in self._ready)

    def _new_name(self) -> str:
        return next(name for i in self._names if not self._knows(name := f"request-{i}"))

    def session(self, prompt: Prompt, *, cache_salt: str | None = None) -> Session:
        """A `Session` that begins with a prompt, to be branched and scored by hand; nothing is computed yet.

        cache_salt: as in `SamplingParams`. Raises ValueError for a prompt that cannot be served, or without
        `prefix_caching`.
        """
        return Session.begin(self, prompt, cache_salt)

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens; returns the requests that gained any, or ended. Nothing queued: an empty list.

        In front stands what requests gained since the last call in the steps that a `Session` took.

        Raises RequestFailed, a ValueError with a `request_id`, for a request that has ended because what it asked for
        cannot be gone on with: its `logits_processor` raised, or a grammar has grown too large. Call it again: the
        others go on, and nothing that they gained is lost.
        """
        self._advance()
        outputs, self._ready = self._ready, []
        return outputs

    def _advance(self, request_id: str | None = None) -> RequestOutput | None:
        """Compute the next tokens; returns what this request gained, if it did. Other outputs, and failures of other
        requests, are kept for `step`."""
        if self._failures and request_id is None:
            raise self._failures.pop(0)
        warm, compiles = self._steps.warm or not self.config.warm_up, self._compile_counter.compiles
        began = time.perf_counter()
        try:
            flight = self._in_flight or self._launch(self._scheduler.schedule())
            if flight is None:
                return None
            self._in_flight = None
            if self.config.async_scheduling and flight.batch.query_starts is None:
                self._in_flight = self._launch(self._scheduler.ahead(flight.plan), flight.sampled.token_ids)
            sampled = flight.land()
            candidates = sampled.candidate_ids, sampled.candidate_logprobs
            gained = self._scheduler.update(
                flight.plan, sampled.token_ids, sampled.logprobs, candidates, sampled.prompt_logprobs
            )
            outputs = {output.request_id: output for output in self._outputs(gained)}
            output = outputs.pop(request_id, None) if request_id else None
            self._ready += outputs.values()
            # Last: what an interruption has left here is told of by `_start_over`.
            for name in (*outputs, request_id):
                group = self._groups.get(name) if name is not None else None
                if group is not None and not group.num_unfinished:
                    del self._groups[group.request_id]
        except BaseException as error:  # Ctrl-C and the alarms of a program come in the middle of anything
            self._start_over()
            if isinstance(error, RequestFailed):  # it would come again, and nobody get on
                error.request_id = self._samples[error.request_id].group.request_id
                self.abort(error.request_id)
                if request_id not in (None, error.request_id):
                    self._failures.append(error)
                    return None
            raise
        if not self._scheduler.has_unfinished:
            self._in_flight = None  # all ended at a token that nobody foresaw
        if flight.batch.query_starts is not None and self._pool.swap_space is not None:
            self._pool.swap_space.costs.record_prompt(time.perf_counter() - began, flight.plan.num_tokens)
        self._record(flight, sum(not request.only_scores for request in gained))
        if warm:
            # Others compile too, between the steps.
            self.stats.num_compiles += self._compile_counter.compiles - compiles
        failures = {failed.request_id: failed for failed in flight.failures}
        for name in failures:
            self.abort(name)
        self._failures += failures.values()
        told = next((failed for failed in self._failures if request_id in (None, failed.request_id)), None)
        if told is not None:
            self._failures.remove(told)
            raise told
        return output

    def _start_over(self) -> None:
        """After an error or an interruption, which may have taken the donated pool with it: an empty pool, for which
        every running request computes its tokens again."""
        self._in_flight = None
        self._scheduler.start_over()
        if self._swap_store is not None:
            self._swap_store.clear()
        self._kv_pages = ()  # made again with the next step: here that could fail too
        told = {output.request_id for output in self._ready if output.finished}
        for group in list(self._groups.values()):
            if group.request_id not in told:
                group.start_over(self._scheduler, self._detokenizer)
                if group.num_unfinished:
                    continue
                if not group.was_aborted:
                    self._ready.append(group.output())
            del self._groups[group.request_id]
        samples = [sample for group in self._groups.values() for sample in group.samples]
        unfinished = [sample for sample in samples if sample.request.status is not RequestStatus.FINISHED]
        self._samples = {sample.request.request_id: sample for sample in unfinished}
        self.stats.record_state(self._scheduler)

    def _launch(self, plan: BatchPlan | None, token_ids: jax.Array | None = None) -> Flight | None:
        """Start a step on the device. `token_ids` are those of the step before, still on the device, row by row."""
        if plan is None:
            return None
        batch, rows = pack(
            plan.rows,
            self._scheduler.rows,
            self._buckets,
            self.model_config.vocab_size,
            decoding=plan.decoding,
            with_rope_lens=self._limits.with_rope_lens,
            with_targets=self.config.prompt_logprobs,
            ahead=token_ids is not None,
        )
        if token_ids is not None:
            batch = batch._replace(token_ids=cast(np.ndarray, token_ids))
        with own_settings():
            if not self._kv_pages:
                self._kv_pages = self._make_kv_pages()
            if self._swap_store is not None:
                self._kv_pages = self._swap_store.run(self._steps, self._kv_pages, plan)
            elif plan.page_copies:
                self._kv_pages = self._steps.copy_pages(self._kv_pages, plan.page_copies)
            self._kv_pages, sampled = self._steps(self.weights, self._kv_pages, batch)
            flight = Flight(plan._replace(rows=rows), batch, sampled)
            flight = flight.adjusted(self._steps, self._scheduler.rows, self.config, token_ids)
        for failed in flight.failures:  # known to the caller by the name of all its samples
            failed.request_id = self._samples[failed.request_id].group.request_id
        return flight

    def abort(self, request_id: str) -> bool:
        """End a request now, all its samples; False if there is no such unfinished request. What it gained and `step`
        has not returned yet is dropped."""
        known = self._knows(request_id)
        self._ready = [output for output in self._ready if output.request_id != request_id]
        group = self._groups.get(request_id)
        if group is None:
            return known
        try:
            for sample in group.samples:
                self._samples.pop(sample.request.request_id, None)
                self._scheduler.abort(sample.request.request_id)
        except BaseException:
            self._start_over()  # pages may be half given back; the group is still there to be aborted
            raise
        del self._groups[request_id]
        if not self._scheduler.has_unfinished:
            self._in_flight = None
        self.stats.record_state(self._scheduler)
        return True

    def reset_prefix_cache(self) -> None:
        """Forget all pages that later requests could begin with. Those that run keep theirs."""
        self._pool.forget()

    def wait_until_warm(self) -> None:
        """Return when every shape is compiled that `warm_up="background"` has under way."""
        self._steps.wait_until_warm()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to compute or to tell."""
        return self._scheduler.has_unfinished or bool(self._ready) or bool(self._failures)

    def snapshot(self) -> dict[str, Any]:
        """What the pool and the unfinished requests look like now, in plain JSON types and without any text: see
        `jpaged.host.snapshot`. To be called between two steps, as everything here."""
        return snapshot(self._scheduler, self._pool)

    @property
    def limits(self) -> Limits:
        """What a request must keep within."""
        return self._limits

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    @property
    def num_pages(self) -> int:
        """Pages that requests can hold."""
        return self._pool.num_pages - 1

    def _outputs(self, gained: list[Request]) -> list[RequestOutput]:
        groups: dict[str, Group] = {}
        searches: dict[str, Group] = {}
        for request in gained:
            sample = self._samples[request.request_id]
            if request.is_beam:
                searches[sample.group.request_id] = sample.group
                continue
            detokenizer = sample.detokenizer
            if detokenizer is not None:
                # A token that ends the text by its id is no part of the text, unless special tokens are shown.
                detokenizer.append(request.output_token_ids[-1])
                if detokenizer.stop_hit is not None:
                    self._scheduler.finish(request, "stop", detokenizer.stop_hit)
                elif request.finish_reason is not None:
                    detokenizer.finish()
            group = groups[sample.group.request_id] = sample.group
            if request.finish_reason is not None:
                del self._samples[request.request_id]
                group.num_unfinished -= 1
        for group in searches.values():
            if self._branch(group):
                groups[group.request_id] = group
        return [group.output() for group in groups.values() if group.shows_progress or not group.num_unfinished]

    def _branch(self, group: Group) -> bool:
        """Has a beam search go on, if all its beams know how they may; True when it has ended."""
        before = [sample.request.request_id for sample in group.samples]
        ended = group.branch(self._scheduler, self._detokenizer)
        for name in before:
            del self._samples[name]
        if not ended:
            self._samples |= {sample.request.request_id: sample for sample in group.samples}
        return ended

    def _record(self, flight: Flight, num_output_tokens: int) -> None:
        self.stats.record_step(
            num_tokens=flight.plan.num_tokens,
            batch_tokens=len(flight.batch.positions),
            is_decode=flight.batch.query_starts is None,
            num_output_tokens=num_output_tokens,
            num_rows=len(flight.plan.rows),
        )
        rows = self._in_flight.plan.rows if self._in_flight else ()
        being_written = sum(request.status is RequestStatus.RUNNING for request, _, _ in rows)
        self.stats.record_kv(
            num_tokens=self._scheduler.num_held_tokens + being_written,
            num_slots=self._pool.num_used * self._pool.page_size,
        )
        self.stats.record_moves(flight.plan)
        self.stats.record_state(self._scheduler)
        if self.config.check_integrity:
            self._scheduler.check()
