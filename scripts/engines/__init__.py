"""Adapters of `scripts/compare_engines.py`: one module per engine, each with a function `load`.

`load(model, options)` returns an object with `version` (a string) and two methods over requests of the workload, which
are dicts `{"prompt": token ids, "max_tokens": n}` to be decoded greedily, end of text ignored:

- `generate(requests)` returns the new token ids of each, all given to the engine at once;
- `stream(request)` returns `(ids, times)`: for every new token the `perf_counter` at which the caller could see it.
"""
