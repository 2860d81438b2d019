"""The benchmark of the update: recorded lengths, and what it counts."""

import json

import pytest
import torch

from benchmarks.lab.model import make_tokenizer
from benchmarks.lengths import at_cap, complete
from benchmarks.update import (
    COMPACT,
    GROUP_SIZE,
    GROUPS,
    TRL,
    Row,
    measure,
    page_table,
    read_results,
    result_of,
    smollm2,
    table,
)


class EndsAfter:
    """A stand-in for a model: a completion ends when it has as many tokens as the first token of its prompt says."""

    def __init__(self, end):
        self.end = end
        self.rows_of_calls = []

    def generate(self, input_ids, attention_mask, max_new_tokens, **sampling):
        self.rows_of_calls.append(len(input_ids))
        new = torch.full((len(input_ids), max_new_tokens), 7)
        for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
            prompt_and_completion = ids[mask.bool()]
            last = int(prompt_and_completion[0]) - (len(prompt_and_completion) - 2) - 1
            if last < max_new_tokens:
                new[row, last:] = self.end
        return torch.cat([input_ids, new], dim=1)


def test_completions_are_as_long_as_if_they_were_generated_in_one_go():
    tokenizer = make_tokenizer()
    model = EndsAfter(tokenizer.eos_token_id)
    prompts = [[3, 9], [5, 9], [4, 9], [12, 9], [30, 9]]
    groups = complete(model, tokenizer, prompts, group_size=2, stages=(4, 8, 20))
    assert [[row.length for row in group] for group in groups] == [[3, 3], [5, 5], [4, 4], [12, 12], [20, 20]]
    assert [group[0].ended for group in groups] == [True, True, True, True, False]
    assert model.rows_of_calls == [10, 6, 4]


def test_lengths_at_a_lower_cap():
    assert at_cap([{"prompt_tokens": 3, "completion_tokens": [4, 9]}], cap=6) == [[4, 6]]


LENGTHS = [{"prompt_tokens": 4 + i, "completion_tokens": [11 + (3 * i + j) % 11 for j in range(8)]} for i in range(12)]
#: All groups are effective, or every second one, or stored ones take the places of the others
CONDITIONS = {
    "all": Row("all", cap=20),
    "half": Row("half", one_in=2, cap=20),
    "replayed": Row("replayed", one_in=2, replay=True, cap=20),
    "checkpointing": Row("checkpointing", checkpointing=True, cap=20),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_trls_tokens_are_those_of_the_widest_rows(name):
    row = CONDITIONS[name]
    size = smollm2(1, vocab_size=64, hidden_size=18, intermediate_size=24)
    updates, first_seconds = measure(row, size, LENGTHS, "cpu", repetitions=1)
    (trls,) = updates[TRL]
    (ours,) = updates[COMPACT]
    if not row.replay:
        # The measured step has the second half of the recorded groups, whose longest prompt is the last one
        assert trls.tokens == GROUPS * GROUP_SIZE * (15 + 20)
    assert 0 < ours.tokens <= trls.tokens
    if name == "half":
        assert ours.tokens < 0.7 * trls.tokens
    assert trls.seconds > 0
    text = table([result_of(row, size, "cpu", updates, first_seconds)])
    assert f"| {ours.tokens / trls.tokens:.3f} " in text
    assert all(seconds > 0 for seconds in first_seconds.values())


def test_a_page_shows_the_latest_measurement_of_each_row_in_their_order(tmp_path):
    def result(name: str, seconds: float, **conditions) -> dict:
        row = {"one_in": 1, "prompt": 0, "micro_batch": 8, "checkpointing": False, "replay": False, "cap": 512}
        return {
            **row,
            **conditions,
            "name": name,
            "model": "tiny",
            "every_position": False,
            TRL: {"seconds": [10.0, 10.0], "tokens": [100, 300], "peak_bytes": 2**31, "first_seconds": 12.0},
            COMPACT: {
                "seconds": [seconds, seconds + 1],
                "tokens": [50, 50],
                "peak_bytes": 2**30,
                "first_seconds": 9.0,
            },
        }

    results = [
        result("half effective", 2.0, one_in=2),
        result("all effective", 9.0),
        result("all effective", 4.0),
        result("checkpointing, prompts of 1,500", 5.0, prompt=1500, checkpointing=True),
    ]
    path = tmp_path / "cpu.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in results))
    results = read_results(path)

    def cells(table: str) -> list[list[str]]:
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]

    assert cells(page_table(results)) == [
        ["all", "0.45 (0.40-0.50)", "1.00 of 2.00 GiB", "0.75", "0.25"],
        ["half", "0.25 (0.20-0.30)", "1.00 of 2.00 GiB", "0.75", "0.25"],
        [
            "all, prompts of 1,500 tokens, gradient checkpointing",
            "0.55 (0.50-0.60)",
            "1.00 of 2.00 GiB",
            "0.75",
            "0.25",
        ],
    ]
    assert cells(page_table(results, ["half effective"])) == [["half", "0.25 (0.20-0.30)", "1.00 of 2.00 GiB"]]
