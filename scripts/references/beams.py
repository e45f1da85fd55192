"""References of beam search: `generate(num_beams=...)` on four of the tiny checkpoints.

Random weights don't end their texts, so the end-of-text ids of a case are tokens that its own beams come across.
Prompts and ids are drawn until the case says something: see `draw_met`, `draw_unmet` and `draw_crowded`.
"""

import itertools
import pathlib
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel

CHECKPOINTS = ("llama", "mistral_sw8", "llama_tied_bias", "llama_multi_eos")
EARLY_STOPPING = (False, True, "never")
# Of each row three cases, one per early_stopping: num_beams, num_return_sequences, length_penalty, max_new_tokens,
# length of the prompt, number of end-of-text ids; then how many of the three results must differ, and in how many a
# sequence must end by an end-of-text id.
MET = (
    (2, 2, 1.0, 20, 7, 1, 3, 3),
    (4, 4, 1.0, 20, 16, 1, 3, 3),
    (4, 2, 2.0, 20, 23, 2, 2, 1),  # with this penalty, longer is nearly always better
    (6, 6, 0.6, 20, 1, 1, 1, 3),
    (4, 3, 0.0, 20, 7, 3, 1, 3),  # False and "never" are one for penalties of 0 and below
    (6, 4, -1.0, 8, 16, 2, 1, 3),
    (6, 6, 1.0, 8, 23, 1, 2, 3),
)
# One case each: the same columns, early_stopping before the last two. The ids are never met; or there are none.
UNMET = (
    (2, 1, 0.6, 8, 1, False, 1),
    (4, 4, 1.0, 20, 16, True, 1),
    (6, 3, -1.0, 20, 23, "never", 2),
    (4, 4, 2.0, 8, 7, False, 3),
    (6, 6, 0.0, 20, 7, False, 0),
    (2, 2, 1.0, 8, 23, "never", 0),
)
# Again three cases, one per early_stopping: the first five columns of MET. See `draw_crowded`.
CROWDED = (4, 4, 0.6, 8, 16)
NOISE = 1e-3  # on every log-probability; rounding is a hundred times smaller
NOISY_RUNS = 8


class Case(NamedTuple):
    prompt: list[int]
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | str
    max_new_tokens: int
    eos: list[int]


class Result(NamedTuple):
    sequences: list[list[int]]  # new tokens, best sequence first, the end-of-text id included
    scores: list[float]

    def num_ended(self, case: Case) -> int:
        """How many of the sequences end by an end-of-text id before `max_new_tokens`."""
        return sum(len(tokens) < case.max_new_tokens for tokens in self.sequences)


class AddNoise(LogitsProcessor):
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + NOISE * (2 * torch.rand(scores.shape, generator=self.generator) - 1)


def write(data: pathlib.Path, out: pathlib.Path) -> None:
    """Write `beams.npz` for each of the checkpoints of the folder `data` into the folder of its name in `out`."""
    for name in CHECKPOINTS:
        (out / name).mkdir(parents=True, exist_ok=True)
        write_cases(data / name, out / name / "beams.npz")


def write_cases(checkpoint: pathlib.Path, path: pathlib.Path) -> None:
    """Write the arrays of N cases with S sequences in all (ragged ones lie end to end, `*_lengths` says how long):

    - per case: `prompt_token_ids [sum of prompt_lengths]`, `prompt_lengths [N]`, `eos_token_ids [sum of eos_lengths]`,
      `eos_lengths [N]`, `num_beams [N]`, `num_return_sequences [N]` (their sum is S), `length_penalty [N]`,
      `early_stopping [N]` ("False", "True" or "never"), `max_new_tokens [N]`;
    - per sequence, case by case and best first: `lengths [S]`, `scores [S]` (transformers' `sequences_scores`),
      `token_ids [sum of lengths]` (new tokens, the end-of-text id included), `logprobs [sum of lengths]`.
    """
    model, exact = (
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.float64)
    )
    cases = [pair for row, settings in enumerate(MET) for pair in draw_met(model, exact, row, *settings)]
    cases += [draw_unmet(model, exact, len(MET) + row, *settings) for row, settings in enumerate(UNMET)]
    cases += draw_crowded(model, exact, len(MET) + len(UNMET), *CROWDED)
    sequences = [tokens for _, result in cases for tokens in result.sequences]
    logprobs = [logprobs_of(model, case.prompt, tokens) for case, result in cases for tokens in result.sequences]
    scores = [score for _, result in cases for score in result.scores]
    penalties = [case.length_penalty for case, _ in cases for _ in range(case.num_return_sequences)]
    for score, values, penalty in zip(scores, logprobs, penalties, strict=True):
        assert abs(score - values.sum() / len(values) ** penalty) < 1e-4 * max(1, abs(score))
    np.savez_compressed(
        path,
        prompt_token_ids=np.array([token for case, _ in cases for token in case.prompt], np.int32),
        prompt_lengths=np.array([len(case.prompt) for case, _ in cases], np.int32),
        eos_token_ids=np.array([token for case, _ in cases for token in case.eos], np.int32),
        eos_lengths=np.array([len(case.eos) for case, _ in cases], np.int32),
        num_beams=np.array([case.num_beams for case, _ in cases], np.int32),
        num_return_sequences=np.array([case.num_return_sequences for case, _ in cases], np.int32),
        length_penalty=np.array([case.length_penalty for case, _ in cases], np.float64),
        early_stopping=np.array([str(case.early_stopping) for case, _ in cases]),
        max_new_tokens=np.array([case.max_new_tokens for case, _ in cases], np.int32),
        lengths=np.array([len(tokens) for tokens in sequences], np.int32),
        scores=np.array(scores, np.float32),
        token_ids=np.concatenate(sequences).astype(np.int32),
        logprobs=np.concatenate(logprobs),
    )
    ended = [result.num_ended(case) for case, result in cases]
    mixed = sum(0 < n < case.num_return_sequences for n, (case, _) in zip(ended, cases, strict=True))
    print(
        f"{checkpoint.name}/{path.name}: {len(cases)} cases, {sum(n > 0 for n in ended)} with sequences that end by an "
        f"end-of-text id, {mixed} of them with others that don't; {sum(ended)} of {len(scores)} sequences end"
    )


def draw_met(
    model: PreTrainedModel, exact: PreTrainedModel, row: int, beams: int, returned: int, penalty: float,
    new_tokens: int, prompt_length: int, num_eos: int, num_different: int, num_ended: int,
) -> list[tuple[Case, Result]]:  # fmt: skip
    """Three cases, alike but for early_stopping, `num_ended` of which have a sequence that ends before
    `max_new_tokens`; `num_different` of their results differ, and none hangs on rounding."""
    for seed in itertools.count():
        rng = np.random.default_rng([row, seed])
        prompt = rng.integers(3, model.config.vocab_size, prompt_length).tolist()
        case = Case(prompt, beams, beams, penalty, False, new_tokens, [])
        met = np.unique([tokens[1:-1] for tokens in search(model, case).sequences])
        if len(met) < num_eos:  # all beams repeat a token
            continue
        eos = rng.choice(met, num_eos, replace=False).tolist()
        cases = [case._replace(num_return_sequences=returned, early_stopping=e, eos=eos) for e in EARLY_STOPPING]
        results = [search(model, case) for case in cases]
        pairs = list(zip(cases, results, strict=True))
        if len({str(result.sequences) for result in results}) < num_different:
            continue
        if sum(result.num_ended(case) > 0 for case, result in pairs) < num_ended:
            continue
        if all(is_safe(model, exact, case, result) for case, result in pairs):
            return pairs


def draw_unmet(
    model: PreTrainedModel, exact: PreTrainedModel, row: int, beams: int, returned: int, penalty: float,
    new_tokens: int, prompt_length: int, early_stopping: bool | str, num_eos: int,
) -> tuple[Case, Result]:  # fmt: skip
    """A case none of whose end-of-text ids is met, and whose result doesn't hang on rounding."""
    for seed in itertools.count():
        rng = np.random.default_rng([row, seed])
        prompt = rng.integers(3, model.config.vocab_size, prompt_length).tolist()
        eos = rng.choice(np.arange(3, model.config.vocab_size), num_eos, replace=False).tolist()
        case = Case(prompt, beams, returned, penalty, early_stopping, new_tokens, eos)
        result = search(model, case)
        if set(eos) & {token for tokens in result.sequences for token in tokens}:
            continue
        if result.sequences == search(model, case._replace(eos=[])).sequences and is_safe(model, exact, case, result):
            return case, result


def draw_crowded(
    model: PreTrainedModel, exact: PreTrainedModel, row: int, beams: int, returned: int, penalty: float,
    new_tokens: int, prompt_length: int,
) -> list[tuple[Case, Result]]:  # fmt: skip
    """Three cases, alike but for early_stopping, where of the `2 * num_beams` best first tokens all but the best end
    the text, so that these alone don't make `num_beams` beams to go on with; yet what starts with a lesser token is
    among the results. No result hangs on rounding."""
    for seed in itertools.count():
        rng = np.random.default_rng([row, seed])
        prompt = rng.integers(3, model.config.vocab_size, prompt_length).tolist()
        case = Case(prompt, 2 * beams, 2 * beams, penalty, False, 1, [])
        best, *eos = [tokens[0] for tokens in search(model, case).sequences]
        case = Case(prompt, beams, returned, penalty, False, new_tokens, eos)
        cases = [case._replace(early_stopping=early_stopping) for early_stopping in EARLY_STOPPING]
        pairs = [(case, search(model, case)) for case in cases]
        lesser = [any(tokens[0] not in (best, *eos) for tokens in result.sequences) for _, result in pairs]
        if any(lesser) and all(is_safe(model, exact, case, result) for case, result in pairs):
            return pairs


def is_safe(model: PreTrainedModel, exact: PreTrainedModel, case: Case, result: Result) -> bool:
    """Whether the same sequences come in the same order with a cache, in float64 and in spite of noise."""
    others = itertools.chain(
        (search(model, case, use_cache=True), search(exact, case)),
        (search(model, case, noise=AddNoise(seed)) for seed in range(NOISY_RUNS)),
    )
    return all(other.sequences == result.sequences for other in others)


@torch.inference_mode()
def search(model: PreTrainedModel, case: Case, use_cache: bool = False, noise: AddNoise | None = None) -> Result:
    # An end-of-text id of None would be replaced by the checkpoint's own.
    model.generation_config.eos_token_id = case.eos or None
    ids = torch.tensor([case.prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=case.num_beams,
        num_return_sequences=case.num_return_sequences,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        max_new_tokens=case.max_new_tokens,
        use_cache=use_cache,
        logits_processor=LogitsProcessorList([noise] if noise else []),
        return_dict_in_generate=True,
        output_scores=True,
    )
    # Shorter sequences are filled up, with an id that may be an end of text: beam_indices tells where they end.
    lengths = (output.beam_indices >= 0).sum(1).tolist()
    new = output.sequences[:, len(case.prompt) :].tolist()
    sequences = [tokens[:length] for tokens, length in zip(new, lengths, strict=True)]
    for tokens in sequences:
        assert len(tokens) == case.max_new_tokens or tokens[-1] in case.eos
        assert not set(tokens[:-1]) & set(case.eos)
    return Result(sequences, output.sequences_scores.tolist())


@torch.inference_mode()
def logprobs_of(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """The log-probability of each token, from one forward over prompt and sequence."""
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1)[torch.arange(len(tokens)), tokens].numpy()
