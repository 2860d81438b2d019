"""What is said where a run continues: its place, and a learning rate that jumps."""

import re

import pytest
import torch
from transformers import get_scheduler

from tests.factories.tiny import logged, run
from trl_dataeff.checkpoint.continuation import is_at_its_end, rate_jump


SCHEDULES = {
    "linear": {},
    "cosine": {},
    "polynomial": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 2},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
}
CONSTANT = ("constant", "constant_with_warmup", "inverse_sqrt")


def make(name: str, steps: int):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    return get_scheduler(
        name, optimizer, num_warmup_steps=1, num_training_steps=steps, scheduler_specific_kwargs=SCHEDULES[name]
    )


def rates_of(scheduler, steps: int) -> list[float]:
    """The rates of the next steps, as the optimizer has them."""
    rates = []
    for _ in range(steps):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("done", [2, 5, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_jump_is_where_the_next_rate_is_not_of_the_schedule(name, done):
    former = make(name, 8)
    rates_of(former, done)
    continued = make(name, 20)
    continued.load_state_dict(former.state_dict())
    continued.optimizer.load_state_dict(former.optimizer.state_dict())
    jump = rate_jump(continued)
    rates = rates_of(continued, 12)
    scheduled = rates_of(make(name, 20), done + 12)[done:]
    assert rates[1:] == pytest.approx(scheduled[1:])
    if rates[0] == pytest.approx(scheduled[0]):
        assert jump is None
        assert name in (*CONSTANT, "warmup_stable_decay")
    else:
        assert jump == pytest.approx(tuple(rates[:2]))
        assert name not in CONSTANT


def test_a_schedule_that_is_restored_whole_is_at_its_end_where_the_rate_is_0():
    def decay(steps):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)

    former = decay(3)
    continued = decay(9)
    rates_of(former, 2)
    continued.load_state_dict(former.state_dict())
    assert not is_at_its_end(continued)
    rates_of(former, 1)
    continued.load_state_dict(former.state_dict())
    continued.optimizer.load_state_dict(former.optimizer.state_dict())
    assert is_at_its_end(continued)
    assert rates_of(continued, 3) == [0, 0, 0]
    assert rate_jump(continued) is None


def said(caplog, folder, **fields) -> list[str]:
    """What a run says of its continuation."""
    caplog.clear()
    trainer = run(folder, save_strategy="steps", save_steps=2, **fields)
    lines = [record.getMessage() for record in caplog.records]
    lines = [line for line in lines if "Continuing" in line or "learning rate" in line]
    rates = [rate for (rate,) in logged(trainer, "learning_rate")]
    for line in lines:
        jump = re.search(r"is (\S+) for the next step.* from (\S+) on", line)
        if jump is not None:
            assert [float(rate) for rate in jump.groups()] == pytest.approx(rates[2:4], rel=1e-2)
    return lines


def test_a_run_that_becomes_longer_says_what_its_rate_does(tmp_path, caplog_transformers):
    said_by = {}
    for name in ("linear", "constant"):
        folder = tmp_path / name
        options = {"lr_scheduler_type": name}
        assert said(caplog_transformers, folder, max_steps=4, **options) == []
        for resume, steps in (("checkpoint-2", 4), ("checkpoint-2", 6), ("checkpoint-4", 4)):
            lines = said(caplog_transformers, folder, max_steps=steps, resume=str(folder / resume), **options)
            said_by[name, resume, steps] = lines
            assert f"{resume} (step {resume[-1]} of {steps})" in lines[0]
    jumps = {which for which, lines in said_by.items() if len(lines) == 2}
    assert jumps == {("linear", "checkpoint-2", 6)}
    assert "nothing is left to do" in said_by["linear", "checkpoint-4", 4][0]
