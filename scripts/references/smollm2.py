"""References on a real model: SmolLM2-135M-Instruct, dequantised from its Q4_1 GGUF to float32."""

import json
import pathlib

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from .texts import CHATS, PROMPTS, STRINGS

NUM_NEW_TOKENS = 64
# Prompts whose whole distribution after the last token is stored; few, for each takes 190 kB.
DISTRIBUTION_OF = ("one_token", "capital", "chat_capital", "long_english")


def write(gguf_path: pathlib.Path, out: pathlib.Path) -> None:
    """Write `smollm2.npz` and `smollm2_tokenizer.json` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    fields = gguf.GGUFReader(gguf_path).fields
    tokenizer = build_tokenizer(fields)
    template = fields["tokenizer.chat_template"].contents()
    write_tokenization(tokenizer, template, out / "smollm2_tokenizer.json")
    prompts = {
        name: tokenizer.encode(text if isinstance(text, str) else render(template, text, True)).ids
        for name, text in PROMPTS.items()
    }
    write_generation(load_model(gguf_path), prompts, out / "smollm2.npz")


def build_tokenizer(fields: dict) -> tokenizers.Tokenizer:
    """The model's own tokenizer from the GGUF's vocabulary and merges.

    The pre-tokenizer named `smollm` splits digits one by one, then works on bytes. transformers' GGUF reader leaves
    the first half out, so numbers would tokenize differently from what the model was trained on.
    """
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    assert tokenizer.get_vocab_size() == len(tokens)
    return tokenizer


def render(template: str, messages: list[dict], add_generation_prompt: bool) -> str:
    rendered, _ = transformers.utils.chat_template_utils.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=add_generation_prompt
    )
    return rendered[0]


def write_tokenization(tokenizer: tokenizers.Tokenizer, template: str, path: pathlib.Path) -> None:
    """Per string its ids and what they decode to (special tokens kept); per chat the rendered text and its ids.

    21 of the 256 bytes have no token in this vocabulary, so a string with one of them loses it: there `decoded` differs
    from `text`.
    """
    strings = []
    for text in STRINGS:
        ids = tokenizer.encode(text).ids
        strings.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False)})
    chats = []
    for messages, add_generation_prompt in CHATS:
        text = render(template, messages, add_generation_prompt)
        chats.append(
            {
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                "text": text,
                "ids": tokenizer.encode(text).ids,
            }
        )
    lines = [json.dumps(s) for s in strings], [json.dumps(c) for c in chats]
    body = ['"strings": [\n' + ",\n".join(lines[0]) + "\n]", '"chats": [\n' + ",\n".join(lines[1]) + "\n]"]
    path.write_text("{\n" + ",\n".join(body) + "\n}\n")
    lossy = [s["text"] for s in strings if s["decoded"] != s["text"]]
    print(f"{path.name}: {len(strings)} strings, {len(chats)} chats; not restored by decoding: {lossy}")


def load_model(gguf_path: pathlib.Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf_path.parent), gguf_file=gguf_path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # The GGUF stores float32(1e-5), which reads as 9.99999974e-06: the published value is meant.
    eps = float(f"{model.config.rms_norm_eps:.6g}")
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = eps
    return model


@torch.inference_mode()
def write_generation(model: transformers.PreTrainedModel, prompts: dict[str, list[int]], path: pathlib.Path) -> None:
    """Write the arrays (prompts are ragged, so they lie end to end and `prompt_starts` says where each begins):

    `names [N]`, `prompt_token_ids [sum of lengths]`, `prompt_starts [N+1]`, `greedy [N, 64]` (end-of-text ignored),
    `logprobs [N, 64]` of those tokens, `gaps [N, 64]` between the best and the second logit (where small, a near tie:
    another order of summation may turn it over), `distribution_of [4]` (indices of prompts), `distributions [4, vocab]`
    (log-softmax after the last prompt token).
    """
    greedy, logprobs, gaps, first = [], [], [], {}
    for name, ids in prompts.items():
        tokens, lps, row_gaps = [], [], []
        step = model(torch.tensor([ids]), use_cache=True)
        for _ in range(NUM_NEW_TOKENS):
            logits = step.logits[0, -1].float()
            log_softmax = torch.log_softmax(logits, -1)
            first.setdefault(name, log_softmax.numpy().copy())
            top = torch.topk(logits, 2)
            tokens.append(int(top.indices[0]))
            lps.append(float(log_softmax[tokens[-1]]))
            row_gaps.append(float(top.values[0] - top.values[1]))
            step = model(torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True)
        greedy.append(tokens), logprobs.append(lps), gaps.append(row_gaps)
    names = list(prompts)
    lengths = [len(ids) for ids in prompts.values()]
    np.savez_compressed(
        path,
        names=np.array(names),
        prompt_token_ids=np.concatenate([np.asarray(ids, np.int32) for ids in prompts.values()]),
        prompt_starts=np.cumsum([0, *lengths]).astype(np.int32),
        greedy=np.array(greedy, np.int32),
        logprobs=np.array(logprobs, np.float32),
        gaps=np.array(gaps, np.float32),
        distribution_of=np.array([names.index(name) for name in DISTRIBUTION_OF], np.int32),
        distributions=np.stack([first[name] for name in DISTRIBUTION_OF]),
    )
    flat = np.sort(np.array(gaps).ravel())
    print(f"{path.name}: {len(names)} prompts of {sorted(lengths)} tokens, smallest gaps {flat[:5].round(5).tolist()}")
