"""`lm-eval`, the evaluation harness, with tasks that lie beside this file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# Read when it is imported: nothing is asked of the hub.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval
import openai
import pytest
from conftest import Server
from lm_eval.tasks import TaskManager

DATA = Path(__file__).parent / "data" / "capitals.jsonl"
QUESTIONS = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(DATA)}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "target_delimiter": "",
}
CHOICE = COMMON | {
    "task": "capitals",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ROLLING = COMMON | {
    "task": "capitals_text",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}{{choices[0]}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}
TEXT = COMMON | {
    "task": "capitals_answers",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture
def evaluate(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a task; gives what was found of each question."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("OPENAI_API_KEY", server.key)

    def run(task: dict[str, Any], model: str, path: str, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
        model_args = {"model": "tiny", "base_url": server.v1 + path, "max_retries": 1, "auth_token": server.key}
        found = lm_eval.simple_evaluate(
            model=model,
            model_args=model_args | {"max_length": 512} | options,
            tasks=[task["task"]],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            apply_chat_template=path == "/chat/completions",
            log_samples=True,
            bootstrap_iters=0,
        )
        samples = sorted(found["samples"][task["task"]], key=lambda sample: sample["doc_id"])
        return found["results"][task["task"]], samples

    return run


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 3}, {"num_concurrent": 4}, {"tokenized_requests": False, "batch_size": 2}],
    ids=str,
)
def test_the_likelihoods_of_answers_are_those_of_the_dense_model(evaluate, server, options):
    """The tokens are those of the server's own tokenizer, which the client finds there by itself."""
    results, samples = evaluate(CHOICE, "local-completions", "/completions", **options)
    hits = []
    for question, sample in zip(QUESTIONS, samples, strict=True):
        first, sums = len(server.references[question["question"]]["logprobs"]), []
        for choice, ((told, is_greedy),) in zip(question["choices"], sample["resps"], strict=True):
            reference = server.references[question["question"] + choice]
            sums.append(sum(reference["logprobs"][first:]))
            assert float(told) == pytest.approx(sums[-1], abs=5e-3)
            assert str(is_greedy) == str(all(reference["likeliest"][first:])), (question, choice)
        hits.append(sums.index(max(sums)) == question["answer"])
    assert results["acc,none"] == sum(hits) / len(hits)


def test_the_likelihoods_of_whole_texts_are_finite(evaluate):
    results, samples = evaluate(ROLLING, "local-completions", "/completions")
    assert len(samples) == len(QUESTIONS) and 0 < results["bits_per_byte,none"] < 100


@pytest.mark.parametrize("options", [{}, {"num_concurrent": 4}, {"batch_size": 4}], ids=str)
def test_texts_are_generated_up_to_a_stop_string(evaluate, server, options):
    _, samples = evaluate(TEXT, "local-completions", "/completions", **options)
    client = openai.OpenAI(base_url=server.v1, api_key=server.key)
    for question, sample in zip(QUESTIONS, samples, strict=True):
        asked = {"prompt": question["question"], "max_tokens": 12, "temperature": 0, "stop": ["e", "\n"]}
        assert sample["resps"] == [[client.completions.create(model="tiny", **asked).choices[0].text]]


@pytest.mark.parametrize("options", [{}, {"num_concurrent": 4}], ids=str)
def test_chats_are_generated_up_to_a_stop_string(evaluate, server, options):
    _, samples = evaluate(TEXT, "local-chat-completions", "/chat/completions", **options)
    client = openai.OpenAI(base_url=server.v1, api_key=server.key)
    for question, sample in zip(QUESTIONS, samples, strict=True):
        asked = {"messages": [{"role": "user", "content": question["question"]}], "max_tokens": 12, "temperature": 0}
        answer = client.chat.completions.create(model="tiny", stop=["e", "\n"], **asked)
        assert sample["resps"] == [[answer.choices[0].message.content]]
