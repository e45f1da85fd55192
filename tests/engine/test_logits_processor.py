"""Functions of a caller between the model's logits and the draw: on the device for all, on the host for one request."""

from __future__ import annotations

import engine_support as support
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.host.sampling_params import SamplingParams

PROMPTS = [[5, 6, 7], [9] * 20, [11, 12]]


def greedy(**options):
    return SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | options))


def never_twice(token_ids, logits):
    logits[token_ids] = -np.inf
    return logits


def never_twice_on_the_device(logits, state):
    seen = jnp.zeros(logits.shape, bool).at[jnp.arange(len(logits))[:, None], state.token_ids].set(True, mode="drop")
    return jnp.where(seen, -jnp.inf, logits)


def test_a_function_on_the_host_changes_its_own_request_alone(engine):
    alone = support.tokens(support.serve(engine, PROMPTS, greedy()))
    repeated = [prompt + tokens for prompt, tokens in zip(PROMPTS, alone)]
    assert any(len(set(tokens)) < len(set(prompt)) + 12 for tokens, prompt in zip(repeated, PROMPTS)), "shows nothing"
    sampling = [greedy(), greedy(logits_processor=never_twice), greedy(logits_processor=never_twice, min_tokens=3)]
    first, *others = support.tokens(support.serve(engine, PROMPTS, sampling))
    assert first == alone[0]
    for prompt, tokens in zip(PROMPTS[1:], others):
        assert len(set(tokens)) == 12 and not set(tokens) & set(prompt)


def test_it_sees_all_tokens_and_the_logits_of_the_model(engine):
    seen = []

    def look(token_ids, logits):
        seen.append((list(token_ids), logits.copy()))
        return logits

    (output,) = support.serve(engine, [[5, 6, 7]], greedy(logits_processor=look, logprobs=True, max_tokens=3))
    (sample,) = output.outputs
    assert [tokens for tokens, _ in seen] == [[5, 6, 7, *sample.token_ids[:i]] for i in range(3)]
    for (_, logits), token, logprob in zip(seen, sample.token_ids, sample.logprobs):
        assert token == logits.argmax()
        assert logprob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-4)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda tokens, logits: 1 / 0, "raised ZeroDivisionError"),
        (lambda tokens, logits: logits[:5], "must return 320 numbers, got float32 of shape"),
        (lambda tokens, logits: None, "must return 320 numbers"),
        (lambda tokens, logits: logits * np.nan, "none of them NaN"),
        (lambda tokens, logits: logits - np.inf, "not all of them -inf"),
    ],
)
def test_one_that_fails_ends_its_request_and_no_other(engine, function, complaint):
    expected = support.tokens(support.serve(engine, PROMPTS[:1], greedy()))
    good = engine.add_request(PROMPTS[0], greedy())
    engine.add_request(PROMPTS[1], greedy(logits_processor=function))
    with pytest.raises(ValueError, match=complaint):
        support.finish(engine)
    assert support.tokens([support.finish(engine)[good]]) == expected
    support.assert_idle(engine)


def test_one_on_the_device_is_compiled_in_for_all(engine):
    sampling = [greedy(), greedy(temperature=1, seed=3), greedy()]
    built = support.build(support.tiny("llama"), logits_processor=never_twice_on_the_device)
    outputs = support.serve(built, PROMPTS, sampling)
    for prompt, tokens in zip(PROMPTS, support.tokens(outputs)):
        assert len(set(tokens)) == 12 and not set(tokens) & set(prompt)
    host = [greedy(logits_processor=never_twice), sampling[1], greedy(logits_processor=never_twice)]
    same = support.tokens(support.serve(engine, PROMPTS, host))
    assert [same[0], same[2]] == [support.tokens(outputs)[0], support.tokens(outputs)[2]]


def test_one_that_changes_the_shape_is_refused():
    built = support.build(support.tiny("llama"), logits_processor=lambda logits, state: logits[:, :7])
    name = built.add_request([5, 6], greedy())
    with pytest.raises(ValueError, match=r"logits_processor must return logits \(\d+, 320\), got \(\d+, 7\)"):
        built.step()
    built.abort(name)


@pytest.mark.parametrize("value", [5, "argmax"])
def test_what_is_no_function_is_refused(value):
    with pytest.raises(ValueError, match="logits_processor must be a function or None"):
        SamplingParams(logits_processor=value)
    with pytest.raises(ValueError, match="logits_processor must be a function or None"):
        support.build(support.tiny("llama"), logits_processor=value)
