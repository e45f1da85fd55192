"""A model of the whole engine without a device: random workloads, a numpy stand-in for `step`, and the property that
any pool, any budget, any order of arrival, any sharing and any abort give every request the tokens it gets alone.

The stand-in reads nothing but the packed `Batch`. Like a transformer of two layers it writes a value for each token
into its slot, reads the history back through block tables and context lengths, writes what it made of it into a second
layer, and draws from a hash of that layer's history and of the row's sampling values. So any wrong page, slot,
position, length, order or sampling row, now or in an earlier chunk, changes a token.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jpaged.host import batch as batch_module
from jpaged.host.batch import Batch, Buckets
from jpaged.host.beam_search import BeamSearch
from jpaged.host.page_pool import PagePool
from jpaged.host.request import Request, RequestStatus
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import Scheduler
from jpaged.host.swap_costs import SwapCosts
from jpaged.host.swap_space import Moves, SwapSpace

VOCAB_SIZE = 11
EOS = frozenset({0})
MAX_LEN = 48
MASK = 2**64 - 1


def mix(x: int) -> int:
    """A 64-bit hash (the finalizer of splitmix64)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


MIX = np.vectorize(mix, otypes=[np.uint64])
TOKEN_VALUES = np.array(
    [[mix(token * 1000 + at + 1) for at in range(MAX_LEN)] for token in range(VOCAB_SIZE)], np.uint64
)
WEIGHTS = np.array([mix(at + 1) | 1 for at in range(MAX_LEN)], np.uint64)


def draw(state: int, temperature, top_k, top_p, min_p, high, low, banned) -> tuple[int, float]:
    """The token and the "log-probability" that a row with this state and these sampling values draws."""
    constants = struct.pack("<fiffII", temperature, top_k, top_p, min_p, high, low)
    for word in struct.unpack("<QQQ", constants):
        state = mix(state ^ word)
    token = state % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token, -(state % 4096) / 256


def rank(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a beam may go on with: ids and "log-probabilities" of each row, best first."""
    words = MIX(states[:, None] ^ np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64))
    logprobs = -(words % 4096).astype(np.float32) / 256
    ids = np.argsort(-logprobs, axis=1, kind="stable")
    return ids, np.take_along_axis(logprobs, ids, axis=1)


class FakeDevice:
    def __init__(self, num_pages: int, page_size: int, num_places: int, window: int | None):
        self.page_size = page_size
        self.window = window or MAX_LEN
        stale = np.random.default_rng(0).integers(1, 2**63, (2, num_pages * page_size), np.uint64)
        self.first_layer, self.second_layer = stale
        self.outside = np.zeros((2, num_places, page_size), np.uint64)  # the swap space

    def run(self, moves: Moves, page_copies: list[tuple[int, int]]) -> None:
        """What comes before a step."""
        pages = [layer.reshape(-1, self.page_size) for layer in (self.first_layer, self.second_layer)]
        filled = [(page_id, self.outside[:, place].copy()) for place, page_id in moves.swap_in]
        for place, on_disk in moves.spills:
            self.outside[:, on_disk] = self.outside[:, place]
        for page_id, place in moves.swap_out:
            self.outside[:, place] = [layer[page_id] for layer in pages]
        if page_copies:
            self.copy(page_copies)
        assert len({page_id for page_id, _ in filled}) == len(filled), "a page is filled twice"
        for page_id, contents in filled:
            for layer, values in zip(pages, contents, strict=True):
                layer[page_id] = values

    def copy(self, page_copies: list[tuple[int, int]]) -> None:
        sources, targets = zip(*page_copies, strict=True)
        assert len(set(targets)) == len(targets), "a page is the target of two copies"
        assert not set(sources) & set(targets), "a page is written by one copy and read by another"
        for layer in (self.first_layer, self.second_layer):
            pages = layer.reshape(-1, self.page_size)
            pages[list(targets)] = pages[list(sources)]

    def step(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
        num_rows = len(batch.context_lens)
        query_starts = np.arange(num_rows + 1) if batch.query_starts is None else batch.query_starts
        self.first_layer[batch.slot_mapping] = TOKEN_VALUES[batch.token_ids, batch.positions]

        histories = []
        for row in range(num_rows):
            seen = np.arange(batch.context_lens[row])
            history = batch.block_tables[row, seen // self.page_size] * self.page_size + seen % self.page_size
            queries = slice(query_starts[row], query_starts[row + 1])
            histories.append(history)
            if len(history):
                sums = np.cumsum(self.first_layer[history] * WEIGHTS[seen])
                # Causal: each sees itself and what is in the window before it. What lies before that cancels out.
                states = sums - np.append(np.zeros(self.window, np.uint64), sums)[: len(sums)]
                states = states[len(states) - (queries.stop - queries.start) :]
                self.second_layer[batch.slot_mapping[queries]] = MIX(states)

        sampled, logprobs, states = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float32), []
        for row, history in enumerate(histories):
            seen = np.arange(max(len(history) - self.window, 0), len(history))
            states.append(np.sum(self.second_layer[history[seen]] * WEIGHTS[seen]))
            *constants, seed, banned_ids = (values[row] for values in batch.sampling)
            sampled[row], logprobs[row] = draw(int(states[-1]), *constants, *seed, banned_ids.tolist())
        return sampled, logprobs, rank(np.array(states, np.uint64))


@dataclass
class Arrival:
    """A request of a workload: when it comes, into how many it forks and when, and when, if ever, one is aborted."""

    prompt: list[int]
    sampling: SamplingParams
    seed: int
    max_tokens: int
    step: int
    n: int  # requests that begin with this prompt, or the width of a beam search
    alike: bool  # these draw the same, so that they find each other's pages
    priority: int
    fork_step: int | None  # when one more branches off; -1: when it waits to go on
    fork_sample: int  # which of them
    abort_step: int | None
    abort_sample: int
    in_flight: bool  # forks and aborts come between schedule() and update()


@dataclass
class Workload:
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    ahead: bool  # whether a decode step starts before the one before it is read
    cuts: bool  # whether steps leave a third of their tokens to the next one
    prefix_caching: bool
    window: int | None
    reserve: float
    swap_pages: int
    disk_pages: int
    costs: SwapCosts
    arrivals: list[Arrival]


def draw_workload(integer: Callable[[int, int], int]) -> Workload:
    """A workload from any source of whole numbers between two bounds, the bounds included."""

    def chance(percent: int) -> bool:
        return integer(1, 100) > 100 - percent

    page_size = (1, 2, 3, 4, 8, 16)[integer(0, 5)]
    max_model_len = integer(2, MAX_LEN)
    arrivals = []
    num_pages = 1 + -(-max_model_len // page_size) + (integer(0, 8) if chance(80) else 100)
    max_num_seqs = integer(1, 10)
    common = [integer(0, VOCAB_SIZE - 1) for _ in range(max_model_len)]
    with_priorities = chance(30)
    for _ in range(integer(1, 9)):
        max_tokens = integer(1, max_model_len)
        sampling = SamplingParams(
            temperature=integer(0, 2) / 2,
            top_k=integer(-1, 3),
            top_p=integer(1, 4) / 4,
            min_p=integer(0, 2) / 4,
            max_tokens=None,
            min_tokens=integer(0, max_tokens) if chance(30) else 0,
            stop_token_ids=[integer(0, VOCAB_SIZE - 1)] if chance(20) else None,
            ignore_eos=chance(60),
        )
        prompt = [integer(0, VOCAB_SIZE - 1) for _ in range(integer(1, max_model_len - 1))]
        if chance(50):
            begin = integer(0, len(prompt))
            prompt[:begin] = common[:begin]
        step = integer(0, 12)
        n = integer(2, 4) if chance(30) else 1
        fork_step = (-1 if chance(40) else step + integer(0, 12)) if chance(40) else None
        abort_step = step + integer(0, 12) if chance(20) else None
        num_pages_each = -(-min(len(prompt) + max_tokens, max_model_len) // page_size)
        if chance(20) and 2 <= n <= max_num_seqs and n * num_pages_each < num_pages:
            sampling = SamplingParams(num_beams=n, n=n, temperature=0, max_tokens=None, ignore_eos=chance(60))
        priority = integer(-1, 1) if with_priorities else 0
        times = step, n, chance(40), priority, fork_step, integer(0, n - 1), abort_step, integer(0, n - 1), chance(50)
        arrivals.append(Arrival(prompt, sampling, integer(0, MASK), max_tokens, *times))
    with_swap = chance(60)
    costs = SwapCosts(page_size, integer(0, 1) == 1, *(integer(0, 8) for _ in range(3)))
    return Workload(
        page_size=page_size,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=integer(1, 12) if chance(50) else integer(1, 100),
        max_model_len=max_model_len,
        ahead=chance(50),
        cuts=chance(30),
        prefix_caching=with_swap or chance(60),
        window=integer(1, 2 * page_size) if chance(25) else None,
        reserve=0.2 if chance(20) else 0,
        swap_pages=integer(1, 3 if chance(40) else 12) if with_swap else 0,
        disk_pages=integer(1, 12) if with_swap and chance(60) else 0,
        costs=costs,
        arrivals=arrivals,
    )


class Asked(NamedTuple):
    """What is asked of one request. A fork has begun with the tokens and log-probabilities of another."""

    arrival: Arrival
    seed: int
    family: str
    begun: tuple[list[int], list[float]] = ([], [])

    def request(self, name: str, parent: Request | None = None) -> Request:
        asked = self.arrival.prompt, self.arrival.sampling, self.seed, EOS, self.arrival.max_tokens
        return Request(
            name,
            *asked,
            parent=parent,
            family=self.family,
            priority=self.arrival.priority,
            is_beam=self.arrival.sampling.num_beams > 1,
            output_token_ids=list(self.begun[0]),
            output_logprobs=list(self.begun[1]),
        )


class Alone:
    """The stand-in for one sequence by itself, from its definition alone."""

    def __init__(self, window: int | None):
        self.window = window or MAX_LEN
        self.first: list[int] = []  # what each token adds to the sums
        self.second: list[int] = []

    def state(self, tokens: list[int]) -> int:
        for at in range(len(self.first), len(tokens)):
            self.first.append(int(TOKEN_VALUES[tokens[at], at]) * int(WEIGHTS[at]) & MASK)
            self.second.append(mix(sum(self.first[-self.window :]) & MASK) * int(WEIGHTS[at]) & MASK)
        return sum(self.second[-self.window :]) & MASK


def alone(asked: Asked, max_model_len: int, window: int | None) -> tuple[list[int], list[float], str, int | None]:
    """What a request must generate: tokens, log-probabilities, finish and stop reason."""
    arrival = asked.arrival
    sampling = arrival.sampling
    outputs, logprobs = map(list, asked.begun)
    ending_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else EOS)
    model = Alone(window)
    while True:
        state = model.state(arrival.prompt + outputs)
        constants = sampling.temperature, max(sampling.top_k, 0), sampling.top_p, sampling.min_p
        banned = ending_ids if len(outputs) < sampling.min_tokens else ()
        token, logprob = draw(state, *constants, asked.seed >> 32, asked.seed & 0xFFFFFFFF, banned)
        outputs.append(token)
        logprobs.append(logprob)
        if token in ending_ids:
            return outputs, logprobs, "stop", token if token in sampling.stop_token_ids else None
        if len(outputs) == arrival.max_tokens or len(arrival.prompt) + len(outputs) == max_model_len:
            return outputs, logprobs, "length", None


def search_of(arrival: Arrival, max_model_len: int) -> BeamSearch:
    ending_ids = frozenset() if arrival.sampling.ignore_eos else EOS
    return BeamSearch(arrival.sampling, ending_ids, min(arrival.max_tokens, max_model_len - len(arrival.prompt)))


def searched_alone(arrival: Arrival, max_model_len: int, window: int | None) -> list:
    """What a beam search must find."""
    search = search_of(arrival, max_model_len)
    beams: list[tuple[list[int], list[float]]] = [([], [])]
    while True:
        states = [Alone(window).state(arrival.prompt + tokens) for tokens, _ in beams]
        branches = search.advance(beams, *rank(np.array(states, np.uint64)))
        if not branches:
            return search.found
        beams = [
            ([*beams[branch.parent][0], branch.token_id], [*beams[branch.parent][1], branch.logprob])
            for branch in branches
        ]


class Search:
    """A beam search of a workload under way: what the engine does with one."""

    def __init__(self, name: str, arrival: Arrival, first: Request, max_model_len: int):
        self.name = name
        self.search = search_of(arrival, max_model_len)
        self.beams = [first]
        self.first_order: int | None = None
        self.ended = self.aborted = False

    def advance(self, scheduler: Scheduler) -> None:
        beams = self.beams
        candidates = [beam.candidates for beam in beams if beam.candidates is not None]
        if self.ended or len(candidates) < len(beams):
            return
        if self.first_order is None:
            self.first_order = beams[0].order
        outputs = [(beam.output_token_ids, beam.output_logprobs) for beam in beams]
        branches = self.search.advance(outputs, *map(np.stack, zip(*candidates, strict=True)))
        places = {self.first_order + i for i in range(self.search.width)} - {beam.order for beam in beams}
        while len(beams) < len(branches):
            order = min(places)
            places.remove(order)
            beam = beams[0].like(f"{self.name}/{order - self.first_order}", parent=beams[0])
            scheduler.add(beam, order=order)
            beams.append(beam)
        self.beams = scheduler.branch(beams, branches)
        self.ended = not branches

    def abort(self, scheduler: Scheduler) -> None:
        if not self.ended:
            self.ended = self.aborted = True
            for beam in self.beams:
                scheduler.abort(beam.request_id)


def assert_same(batch: Any, plain: Any) -> None:
    """That packing from the vectors of the rows that decode is the same as looking at each request."""
    for name, one, other in zip(batch._fields, batch, plain):
        if isinstance(one, tuple):
            assert_same(one, other)
        else:
            assert (one is None) == (other is None) and np.array_equal(one, other), name


def run(workload: Workload, check_accounts: bool = True) -> Scheduler:
    """Serves a workload and asserts the property. Without `check_accounts`, by the tokens alone."""
    swap_space = None
    if workload.swap_pages:
        swap_space = SwapSpace(workload.swap_pages, workload.costs, workload.disk_pages)
    pool = PagePool(workload.num_pages, workload.page_size, swap_space)
    limits = workload.max_num_seqs, workload.max_num_batched_tokens, workload.max_model_len
    scheduler = Scheduler(
        pool,
        max_num_seqs=limits[0],
        max_num_batched_tokens=limits[1],
        max_model_len=workload.max_model_len,
        step_size=(lambda num_tokens: -(-2 * num_tokens // 3)) if workload.cuts else None,
        prefix_caching=workload.prefix_caching,
        sliding_window=workload.window,
        reserve=workload.reserve,
    )
    buckets = Buckets.make(*limits, workload.page_size)
    num_places = workload.swap_pages + workload.disk_pages
    device = FakeDevice(workload.num_pages, workload.page_size, num_places, workload.window)
    asked: dict[str, Asked] = {}
    requests: dict[str, Request] = {}
    tokens_when_aborted: dict[str, list[int]] = {}
    searches: dict[int, Search] = {}

    def add(name: str, what: Asked, parent: Request | None = None) -> None:
        asked[name], requests[name] = what, what.request(name, parent)
        scheduler.add(requests[name])

    def change(step: int, in_flight: bool) -> None:
        for index, arrival in enumerate(workload.arrivals):
            if arrival.in_flight != in_flight:
                continue
            if index in searches:
                if arrival.abort_step == step:
                    searches[index].abort(scheduler)
                continue
            parent = requests.get(f"{index}/{arrival.fork_sample}")
            if parent is None or f"{index}/fork" in requests:
                is_time = False
            elif arrival.fork_step == -1:
                is_time = parent.num_preemptions > 0 and parent.status is RequestStatus.WAITING
            else:
                is_time = arrival.fork_step == step and parent.status is not RequestStatus.FINISHED
            if is_time:
                seed = arrival.seed ^ (0 if arrival.alike else 1 << 40)
                begun = list(parent.output_token_ids), list(parent.output_logprobs)
                add(f"{index}/fork", Asked(arrival, seed, f"{index}/fork", begun), parent)
            name = f"{index}/{arrival.abort_sample}"
            if arrival.abort_step == step and scheduler.abort(name):
                tokens_when_aborted[name] = list(requests[name].output_token_ids)
        if check_accounts:
            scheduler.check()

    # The first running request advances in each step, and none computes more tokens than this while it is the first.
    # It may start again for each more urgent one.
    most_steps = (1 + len(workload.arrivals)) * sum(
        (one.n + 1) * min(len(one.prompt) + one.max_tokens, workload.max_model_len) for one in workload.arrivals
    )
    num_steps, step = 0, -1
    in_flight = None  # (plan, batch, sampled, logprobs, candidates) of a step that was started ahead

    def launch(plan, token_ids=None):
        if plan is None:
            return None
        if check_accounts:
            scheduler.check()
        assert sum(num_tokens for _, _, num_tokens in plan.rows) == plan.num_tokens <= limits[1], (
            "the budget is exceeded"
        )
        assert len(plan.rows) <= limits[0] and all(num_tokens > 0 for _, _, num_tokens in plan.rows)
        batch, rows = batch_module.pack(
            plan.rows, scheduler.rows, buckets, VOCAB_SIZE, decoding=plan.decoding, ahead=token_ids is not None
        )
        if check_accounts and plan.decoding is not None:
            plain, in_order = batch_module.pack(
                plan.rows, scheduler.rows, buckets, VOCAB_SIZE, ahead=token_ids is not None
            )
            assert rows == in_order
            assert_same(batch, plain)
        shape = len(batch.token_ids), len(batch.context_lens), batch.query_starts is None
        assert shape in buckets.all_shapes(), f"{shape} is no shape that warm-up compiles"
        if token_ids is not None:
            batch = batch._replace(token_ids=np.asarray(token_ids, np.int32))
        if plan.page_copies:
            batch_module.pack_copies(plan.page_copies, buckets)
        device.run(plan.moves, plan.page_copies)
        return plan._replace(rows=rows), batch, *device.step(batch)

    while scheduler.has_unfinished or step < 24:
        step += 1
        for index, arrival in enumerate(workload.arrivals):
            if arrival.step == step and arrival.sampling.num_beams > 1:
                first = Asked(arrival, arrival.seed, f"{index}").request(f"{index}/0")
                searches[index] = Search(f"{index}", arrival, first, workload.max_model_len)
                scheduler.add(first)
            elif arrival.step == step:
                for i in range(arrival.n):
                    add(
                        f"{index}/{i}",
                        Asked(arrival, arrival.seed ^ (0 if arrival.alike else i), f"{index}"),
                        requests.get(f"{index}/0"),
                    )
        change(step, in_flight=False)
        flight, in_flight = in_flight, None
        if flight is None:
            plan = scheduler.schedule()
            assert (plan is not None) == scheduler.has_unfinished, "nothing is planned while requests are unfinished"
            flight = launch(plan)
        if flight is None:
            continue
        plan, batch, sampled, logprobs, candidates = flight
        num_steps += 1
        assert num_steps <= most_steps, "no progress"
        if workload.ahead and batch.query_starts is None:
            in_flight = launch(scheduler.ahead(plan), sampled)
        change(step, in_flight=True)
        scheduler.update(plan, sampled, logprobs, candidates)
        for search in searches.values():
            search.advance(scheduler)
        if check_accounts:
            scheduler.check()

    for index, search in searches.items():
        if not search.aborted:
            expected = searched_alone(workload.arrivals[index], workload.max_model_len, workload.window)
            assert search.search.found == expected, "another search than alone"
    for name, request in requests.items():
        tokens, logprobs, finish_reason, stop_reason = alone(asked[name], workload.max_model_len, workload.window)
        assert request.status is RequestStatus.FINISHED
        if name in tokens_when_aborted:
            assert request.output_token_ids == tokens_when_aborted[name], "tokens came after the abort"
            assert request.output_token_ids == tokens[: len(request.output_token_ids)]
            assert request.finish_reason == "abort"
        else:
            assert request.output_token_ids == tokens, "other tokens than alone"
            assert request.output_logprobs == logprobs
            assert (request.finish_reason, request.stop_reason) == (finish_reason, stop_reason)
    if check_accounts:
        assert pool.num_free == workload.num_pages - 1, "pages are lost"
    return scheduler
