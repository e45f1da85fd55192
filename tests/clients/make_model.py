"""Makes the model that clients are tested with: `python make_model.py FOLDER`, in the environment of jpaged.

A checkpoint of one layer with a real tokenizer, whose weights are random, but for what they are made to do:

- after a prompt that shows tools, it calls one: what a model says of itself comes out the same whoever asks;
- it writes no white space alone, and closes quotes and brackets as soon as it may, so that JSON comes to an end.

Beside it, `references.json` has the log-probability of each token of the texts to evaluate, by the dense model: neither
the server nor the engine has a part in them.
"""

from __future__ import annotations

import itertools
import json
import lzma
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

import jpaged
from jpaged.checkpoint import save
from jpaged.device.params import Params, weight_shapes
from jpaged.models.config import ModelConfig

HERE = Path(__file__).parent
TOKENIZER = HERE.parent / "data" / "tokenizers" / "smollm2.json.xz"
EVALUATION = HERE / "data" / "capitals.jsonl"

BEGIN_CALL, END_CALL = "<tool_call>", "</tool_call>"
CUE = "<empty_output>"  # a special token that nothing else uses: after it, the model calls
CALL = BEGIN_CALL + '{"name":"weather","arguments": {"places" : ["Oslo"]}}' + END_CALL
CLOSING = ('"', '"}', '"]', "}", "}}", "]", "]}", '",', '","', ",", '":', '":"', "<|im_end|>")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}\nCall them in <tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if tools and messages[-1].role != 'tool' %}" + CUE + "{% endif %}{% endif %}"
)
RANDOM, SCRIPTED = 32, 32  # axes of the residual stream
SCALES = {"embed": 1.0, "head": 0.25}  # of random weights, where it is not 0.2


def tokenizer_fields() -> dict[str, Any]:
    """SmolLM2's tokenizer with the markers of a call as tokens of their own, as Qwen's has them."""
    fields = json.loads(lzma.decompress(TOKENIZER.read_bytes()))
    size = len(fields["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    fields["added_tokens"] += [
        {"id": size + i, "content": text, **flags} for i, text in enumerate((BEGIN_CALL, END_CALL))
    ]
    return fields


def make_params(tokenizer: tokenizers.Tokenizer) -> Params:
    """The axes are: random ones, a one for each token of the call, and one on which all tokens are alike."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=tokenizer.get_vocab_size(),
        d_model=RANDOM + SCRIPTED,
        d_ff=32,
        num_layers=1,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_position=1024,
        eos_token_ids=(2,),
        sampling_defaults=(("temperature", 0.7), ("top_k", 20)),  # so that texts come to an end, too
    )
    rng = np.random.default_rng(0)

    def filled(name: str, shape: Any) -> Any:
        if isinstance(shape, tuple) and shape and isinstance(shape[0], dict):
            return tuple({key: filled(key, value) for key, value in layer.items()} for layer in shape)
        if name.endswith("norm"):
            return np.ones(shape, np.float32)
        return (rng.normal(size=shape) * SCALES.get(name, 0.2)).astype(np.float32)

    weights = {name: filled(name, shape) for name, shape in weight_shapes(config).items()}
    for name in ("out", "down"):  # what attention and MLP add is random, too
        weights["layers"][0][name][..., RANDOM:] = 0
    embed, head = weights["embed"], weights["head"]
    embed[:, RANDOM:] = head[RANDOM:] = 0
    embed[:, -1] = 1

    said = [CUE, *tokenizer.encode(CALL, add_special_tokens=False).tokens, "<|im_end|>"]
    script = _ids(tokenizer, said)
    assert len(set(script)) == len(script) < SCRIPTED, f"each token has one that follows: {said}"
    for axis, (token_id, following) in enumerate(itertools.pairwise(script), RANDOM):
        embed[token_id, axis] = 10
        head[axis, following] = 10
    texts = tokenizer.decode_batch([[token_id] for token_id in range(config.vocab_size)])
    head[-1, [token_id for token_id, text in enumerate(texts) if not text.strip()]] = -100
    head[-1, _ids(tokenizer, CLOSING)] = 4
    return Params(jax.tree.map(jnp.asarray, weights), config, None)


def _ids(tokenizer: tokenizers.Tokenizer, tokens: Iterable[str]) -> list[int]:
    return [token_id for token in tokens if (token_id := tokenizer.token_to_id(token)) is not None]


def references(params: Params, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Questions, and questions with an answer, to the log-probabilities of their tokens from the second on, and whether
    each is the likeliest in its place."""
    questions = map(json.loads, EVALUATION.read_text(encoding="utf-8").splitlines())
    texts = [question["question"] + choice for question in questions for choice in ["", *question["choices"]]]
    ids = [tokenizer.encode(text).ids for text in texts]
    padded = np.zeros((len(ids), max(map(len, ids))), np.int32)
    for row, of_text in zip(padded, ids, strict=True):
        row[: len(of_text)] = of_text
    logits = np.asarray(jax.jit(jpaged.forward)(params, padded), np.float64)
    scores = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    found = {}
    for text, of_text, rows in zip(texts, ids, scores, strict=True):
        places = [*zip(rows, of_text[1:])]
        found[text] = {
            "logprobs": [row[token_id] for row, token_id in places],
            "likeliest": [int(row.argmax()) == token_id for row, token_id in places],
        }
    return found


def main(folder: Path) -> None:
    fields = tokenizer_fields()
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
    params = make_params(tokenizer)
    save(params, folder)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "references.json").write_text(json.dumps(references(params, tokenizer)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
