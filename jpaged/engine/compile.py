"""Owns the compiled steps: one program for each shape of batch, made ahead and in parallel."""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jpaged.device.adjusted_sampler import Processor, Told, jitted_sample_adjusted
from jpaged.device.kv_pages import jitted_put, kv_pages_like, kv_shape, take_pages
from jpaged.device.sampler import Sampled, Scores
from jpaged.device.step import BEST, Kernels, check_kernels, jitted_copy, jitted_step_on
from jpaged.device.tiles import COMPILER_OPTIONS
from jpaged.host.adjustments import Adjustments, none_of
from jpaged.host.batch import Batch, Buckets, SamplingBatch, pack_copies
from jpaged.host.cache import cache_dir
from jpaged.host.sampling_params import MAX_BANNED_IDS
from jpaged.models.config import ModelConfig

log = logging.getLogger("jpaged")
TELL_EVERY = 10  # seconds, while all wait for programs

Step = tuple[int, int, bool]  # tokens, rows, whether it is a decode batch
Named = tuple[str, int]  # "copy", "take" or "put", and how many pages; "adjust", and how many rows
Shape = Step | Named


class LateCompileError(RuntimeError):
    """A batch had a shape that warm-up did not compile, and `late_compile="error"` forbids compiling it now."""


def use_compilation_cache(directory: str | None) -> None:
    """Keep compiled programs in `directory` between runs, small and quick ones too.

    None leaves a cache that the program has chosen in place, and otherwise takes jpaged's own. "" keeps none.
    These are settings of JAX, for the whole process.
    """
    chosen = directory is not None
    if directory is None:
        if jax.config.jax_compilation_cache_dir:
            return
        directory = str(cache_dir() / "xla")
    if directory:
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            if chosen:
                raise ValueError(f"compilation_cache_dir {directory!r} cannot be made ({error.strerror})") from error
            log.warning("compiled programs are not kept: %s cannot be made (%s)", directory, error.strerror)
            return
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextmanager
def own_settings() -> Iterator[None]:
    """JAX as the compiled steps need it, whatever the caller debugs: no step through programs made ahead, and the
    transfers between host and device that a step is made of."""
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        yield


class CompileCounter:
    """Counts what XLA compiled in this process, programs found in the persistent cache aside."""

    def __init__(self):
        self.requests = 0
        self.hits = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with self._lock:
                self.requests += 1

    def _on_event(self, event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            with self._lock:
                self.hits += 1

    @property
    def compiles(self) -> int:
        return self.requests - self.hits


_counter: CompileCounter | None = None


def compile_counter() -> CompileCounter:
    """The process's one counter: JAX's listeners cannot be taken back."""
    global _counter
    if _counter is None:
        _counter = CompileCounter()
    return _counter


def batch_like(shape: Step, buckets: Buckets, with_rope_lens: bool, with_targets: bool = False) -> Batch:
    """A batch of one shape with shapes and dtypes for arrays."""
    tokens, rows, is_decode = shape
    array = jax.ShapeDtypeStruct
    return Batch(
        token_ids=array((tokens,), np.int32),
        positions=array((tokens,), np.int32),
        slot_mapping=array((tokens,), np.int32),
        block_tables=array((rows, buckets.pages_per_seq), np.int32),
        context_lens=array((rows,), np.int32),
        query_starts=None if is_decode else array((rows + 1,), np.int32),
        sampling=sampling_like(rows),
        rope_lens=array((tokens,), np.int32) if with_rope_lens else None,
        targets=array((tokens,), np.int32) if with_targets and not is_decode else None,
    )


def sampling_like(rows: int) -> SamplingBatch:
    array = jax.ShapeDtypeStruct
    return SamplingBatch(
        temperature=array((rows,), np.float32),
        top_k=array((rows,), np.int32),
        top_p=array((rows,), np.float32),
        min_p=array((rows,), np.float32),
        seed=array((rows, 2), np.uint32),
        banned_ids=array((rows, MAX_BANNED_IDS), np.int32),
    )


class CompiledSteps:
    """`step`, what draws from adjusted logits, and what moves pages, compiled for each shape of `buckets`, with the
    precision of matrix products that holds when this is made.

    `weights` may be arrays or shapes: shapes, dtypes and shardings are read, nothing is kept.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        buckets: Buckets,
        *,
        num_pages: int,
        kv_dtype: Any,
        kernels: Kernels = BEST,
        num_candidates: int = 0,
        swap_sizes: Sequence[int] = (),
        with_targets: bool = False,
        logits_processor: Processor | None = None,
        device: jax.Device | None = None,
        allow_late: bool,
    ):
        self._config = config
        self._weights = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=getattr(w, "sharding", None)), weights
        )
        self._kv_pages = kv_pages_like(config, num_pages, buckets.page_size, kv_dtype)
        self._buckets = buckets
        self.swap_sizes = swap_sizes  # ascending: how many pages are taken, or put, at once
        self._kernels = kernels
        self._num_candidates = num_candidates
        self._logits_processor = logits_processor
        self._device = device  # for which kernels are chosen; None: the default one
        self._batch_fields = needs_rope_lens(config), with_targets
        with jax.default_device(self._device or jax.config.jax_default_device):
            largest = batch_like(buckets.largest_shapes()[-1], buckets, *self._batch_fields)
            check_kernels(config, largest, self._kv_pages[0][0], jax.tree.leaves(self._weights)[0].dtype, kernels)
        self._precision = jax.config.jax_default_matmul_precision
        self._programs: dict[Shape, Callable] = {}
        self._neutral: dict[int, Adjustments] = {}
        self._allow_late = allow_late
        self._to_come: dict[Shape, Future[Callable]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def warm_up(self, num_threads: int) -> None:
        """Start to compile every shape, in so many threads. From now on a shape that is not among them is late."""
        self._to_come = {shape: Future() for shape in self._all_shapes()}
        queue = deque(self._to_come.items())
        # Not an executor: those work off their queue before a program may end.
        self._threads = [
            threading.Thread(target=self._work_off, args=(queue,), name="jpaged-compile") for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def wait_until_warm(self) -> None:
        """Return when every shape is compiled; raises what a compilation raised."""
        for thread in self._threads:
            while thread.is_alive():
                thread.join(TELL_EVERY)
                done = sum(future.done() for future in self._to_come.values())
                if thread.is_alive():
                    log.info("compiled %d of %d programs", done, len(self._to_come))
        for shape in list(self._to_come):
            self._program_to_come(shape)  # in this thread, if an interruption left it undone

    def run_each_once(self, weights: Any, kv_pages: Any) -> Any:
        """Run every program on a batch of nothing but padding, which touches no page but the null page; returns the
        pool. The first run of a program takes a fraction of a second longer than the others."""
        for shape, program in self._programs.items():
            like = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self._inputs_like(shape))
            if len(shape) == 3:
                kv_pages, _ = program(weights, kv_pages, *like)
            elif shape[0] == "take":
                jax.block_until_ready(program(kv_pages, *like))
            elif shape[0] == "adjust":
                jax.block_until_ready(program(*like))
            else:
                kv_pages = program(kv_pages, *like)
        return jax.block_until_ready(kv_pages)

    @property
    def warm(self) -> bool:
        """Whether a compilation from now on would be late."""
        return bool(self._to_come) and all(future.done() for future in self._to_come.values())

    def _work_off(self, queue: deque[tuple[Shape, Future[Callable]]]) -> None:
        while queue and threading.main_thread().is_alive():
            try:
                shape, future = queue.popleft()
            except IndexError:
                return  # another thread was faster
            self._fulfil(shape, future)

    def _fulfil(self, shape: Shape, future: Future[Callable]) -> None:
        """Compile a shape, unless another thread has taken it on."""
        with self._lock:
            if future.running() or future.done():
                return
            future.set_running_or_notify_cancel()
        try:
            future.set_result(self._compile(shape))
        except Exception as error:  # whoever needs the program is told
            future.set_exception(error)
        except BaseException as error:  # Ctrl-C says nothing about the program: the next one to need it tries again
            self._to_come[shape] = Future()
            future.set_exception(error)
            raise

    def temporary_bytes(self, shape: Step) -> int:
        """Memory that a step of this shape takes beside its arguments."""
        memory = self._lower(shape).compile(self._compiler_options).memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def __call__(self, weights: Any, kv_pages: Any, batch: Batch):
        shape = (len(batch.positions), len(batch.context_lens), batch.query_starts is None)
        program = self._programs.get(shape) or self._program_to_come(shape)
        return program(weights, kv_pages, batch)

    def adjust(
        self, drawn: Sampled, scores: Scores, batch: Batch, adjustments: Adjustments, token_ids: Any = None
    ) -> tuple[Sampled, Told]:
        """What is drawn from the adjusted `scores` of a step, which are used up, in place of what it has `drawn`.
        `token_ids`: the last tokens, if they are only known on the device."""
        rows = len(batch.context_lens)
        neutral = self._neutral.get(rows)
        if neutral is None:  # on the device, as most of it is the same in most steps
            neutral = none_of(rows, self.history_len, self._config.vocab_size)
            neutral = self._neutral[rows] = jax.device_put(neutral, self._replicated or self._device)
        if token_ids is not None:
            adjustments = adjustments._replace(last_ids=token_ids)
        given = adjustments._asdict().items()
        adjustments = neutral._replace(**{name: value for name, value in given if value is not None})
        drawn = Sampled(drawn.token_ids, drawn.logprobs)
        return self._program("adjust", rows)(scores, batch.sampling, batch.context_lens, adjustments, drawn)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def history_len(self) -> int:
        return self._buckets.pages_per_seq * self._buckets.page_size

    @property
    def most_swapped(self) -> int:
        return self.swap_sizes[-1]

    def copy_pages(self, kv_pages: Any, page_copies: Sequence[tuple[int, int]]) -> Any:
        """The pool with these pages (source, target) copied."""
        packed = pack_copies(page_copies, self._buckets)
        return self._program("copy", len(packed))(kv_pages, packed)

    def take_pages(self, kv_pages: Any, page_ids: Sequence[int]) -> jax.Array:
        """The contents of at most `swap_sizes[-1]` pages, and of some more that mean nothing. It is on its way to the
        host."""
        packed = self._packed(page_ids)
        taken = self._program("take", len(packed))(kv_pages, packed)
        taken.copy_to_host_async()
        return taken

    def put_pages(self, kv_pages: Any, page_ids: Sequence[int], contents: np.ndarray) -> Any:
        """The pool with the contents of at most `swap_sizes[-1]` pages, [num_layers, 2, n, ...]."""
        packed = self._packed(page_ids)
        padding = len(packed) - len(page_ids)
        padded = np.pad(contents, [(0, padding if axis == 2 else 0) for axis in range(contents.ndim)])
        return self._program("put", len(packed))(kv_pages, packed, padded)

    def _packed(self, page_ids: Sequence[int]) -> np.ndarray:
        """Page ids padded with the null page."""
        packed = np.zeros(self.swap_sizes[bisect_left(self.swap_sizes, len(page_ids))], np.int32)
        packed[: len(page_ids)] = page_ids
        return packed

    def _program(self, name: str, number: int) -> Callable:
        return self._programs.get((name, number)) or self._program_to_come((name, number))

    def _all_shapes(self) -> list[Shape]:
        moves = [("copy", n) for n in self._buckets.copies]
        moves += [(name, n) for n in self.swap_sizes for name in ("take", "put")]
        adjusted = [("adjust", rows) for rows in sorted({rows for _, rows, _ in self._buckets.all_shapes()})]
        return [*self._buckets.all_shapes(), *moves, *adjusted]

    def _program_to_come(self, shape: Shape) -> Callable:
        future = self._to_come.get(shape)
        if future is not None:
            self._fulfil(shape, future)  # in front of the queue
            return future.result()
        if self._to_come:
            things = "rows" if shape[0] == "adjust" else "pages"
            batch = f"{shape[0]} tokens in {shape[1]} rows" if len(shape) == 3 else f"{shape[1]} {things} to {shape[0]}"
            what = f"a batch of {batch} was not compiled at warm-up"
            if not self._allow_late:
                raise LateCompileError(f"{what}, and late_compile='error' forbids compiling it now")
            log.warning("%s: compiling it now", what)
        return self._compile(shape)

    def _inputs_like(self, shape: Shape) -> tuple[Any, ...]:
        """Shapes of a program's arguments beside weights and pool."""
        if len(shape) == 3:
            return (batch_like(shape, self._buckets, *self._batch_fields),)
        name, num_pages = shape
        if name == "adjust":
            return self._adjust_like(num_pages)
        if name == "copy":
            return (jax.ShapeDtypeStruct((num_pages, 2), np.int32),)
        page_ids = jax.ShapeDtypeStruct((num_pages,), np.int32)
        if name == "take":
            return (page_ids,)
        pages = kv_shape(self._config, num_pages, self._buckets.page_size)
        dtype = self._kv_pages[0][0].dtype
        return page_ids, jax.ShapeDtypeStruct((self._config.num_layers, 2, *pages), dtype)

    def _adjust_like(self, rows: int) -> tuple[Any, ...]:
        vocab = self._config.vocab_size
        scores = Scores(*(jax.ShapeDtypeStruct((rows, n), np.float32) for n in (vocab, MAX_BANNED_IDS)))
        none = jax.eval_shape(lambda: none_of(rows, self.history_len, vocab))
        positions, logprobs = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (np.int32, np.float32))
        like = scores, sampling_like(rows), positions, none, Sampled(positions, logprobs)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._replicated), like)

    @property
    def _compiler_options(self) -> dict[str, Any] | None:
        platform = (self._device or jax.devices()[0]).platform
        return None if self._kernels.tiles is None else COMPILER_OPTIONS[platform]

    @property
    def _replicated(self) -> NamedSharding | None:
        """How the scores lie of weights that are spread over devices."""
        for leaf in jax.tree.leaves(self._weights):
            if isinstance(leaf.sharding, NamedSharding):
                return NamedSharding(leaf.sharding.mesh, PartitionSpec())
        return None

    def _lower(self, shape: Shape):
        # Such settings hold for a thread: without this, a program would depend on which thread makes it.
        with (
            own_settings(),
            jax.enable_x64(False),
            jax.numpy_rank_promotion("allow"),
            jax.default_matmul_precision(self._precision),
            jax.default_device(self._device or jax.config.jax_default_device),
        ):
            inputs = self._inputs_like(shape)
            if len(shape) == 3:
                options = self._kernels, self._num_candidates
                step = jitted_step_on(self._replicated)
                return step.lower(self._config, self._weights, self._kv_pages, *inputs, *options)
            if shape[0] == "adjust":
                chosen = {"processor": self._logits_processor, "tile_rows": self._kernels.sampler_rows}
                return jitted_sample_adjusted.lower(*inputs, **self._kernels.others, **chosen)
            if shape[0] == "copy":
                return jitted_copy.lower(self._kv_pages, *inputs, self._kernels)
            move = jitted_put if shape[0] == "put" else jax.jit(take_pages, out_shardings=self._on_the_host())
            return move.lower(self._kv_pages, *inputs)

    def _on_the_host(self) -> Any:
        """Where pages that are taken go: memory that a GPU writes while the host does something else. (That of a CPU is
        at hand anyway.)"""
        if self._device is None or self._device.platform == "cpu":
            return None
        return SingleDeviceSharding(self._device, memory_kind="pinned_host")

    def _compile(self, shape: Shape) -> Callable:
        program = self._programs[shape] = self._lower(shape).compile(self._compiler_options)
        return program


def needs_rope_lens(config: ModelConfig) -> bool:
    """Whether the model's rotary embeddings depend on the length of the sequence."""
    return config.rope_scaling is not None and config.rope_scaling.kind == "dynamic"
