"""The logs and groups that a run has left in its `output_dir`, ours or plain TRL's; and a table of several runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trl_dataeff.tracking.files import GROUPS_FILE, METRICS_FILE, RUN_FILE, read_groups, read_metrics
from trl_dataeff.tracking.methods import methods_used
from trl_dataeff.utils import PREFIX, UserError, is_number, number_problem


STATE_FILE = "trainer_state.json"
#: Name of a checkpoint's folder; the group is its step
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
#: Steps at each end of a run over which the reward in training is a mean: a step has few prompts
STEPS_OF_AN_END = 5


@dataclass(frozen=True)
class RecordedRun:
    """
    A run as its files have it.

    Attributes:
        path (`Path`): its `output_dir`.
        about (`dict`): of `run.json`: selector, model and number of prompts; empty for a run of plain TRL.
        logs (`pd.DataFrame`): a row for each log, in order: `step`, metrics, and where they are known `rollouts`
            and `time`, seconds of training steps; NaN where a log has no finite number.
        groups (`pd.DataFrame` or `None`): of `groups.parquet`.
        name (`str`): what a table or a figure calls it.
    """

    path: Path
    about: dict[str, Any]
    logs: pd.DataFrame
    groups: pd.DataFrame | None
    name: str = ""

    def series(self, metric: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """
        The values of a metric over an axis. Logs that lack one of the two are left out.

        Args:
            metric (`str`): name of the metric.
            x (`str`, *optional*, defaults to `"step"`): name of the axis: `"step"`, `"rollouts"` or `"time"`.

        Returns:
            `tuple[np.ndarray, np.ndarray]`: positions and values, both of shape `(n,)`, in order. Where several logs
            have one position, such as those of several held-out datasets, the value is their mean.
        """
        both = self.logs.reindex(columns=[x, metric]).dropna()
        means = both.groupby(x, sort=False)[metric].mean()
        return means.index.to_numpy(dtype=float), means.to_numpy(dtype=float)

    @property
    def last(self) -> dict[str, float]:
        """The last value of each metric."""
        return dict(self.logs.ffill().iloc[-1])

    @property
    def is_ours(self) -> bool:
        """Whether a trainer of this package has logged it."""
        return bool(self.about) or any(name.startswith(PREFIX) for name in self.logs)

    @property
    def held_out(self) -> str:
        """The metric of held-out data: `eval_reward`, or the first other reward of an evaluation; empty if none."""
        rewards = [name for name in self.logs if name.startswith("eval_") and "reward" in name]
        if "eval_reward" in rewards:
            return "eval_reward"
        means = [name for name in rewards if not name.endswith("std")]
        return means[0] if means else ""

    def effective_share(self) -> tuple[np.ndarray, np.ndarray]:
        """
        The share of effective groups among those generated. For plain TRL it follows from `frac_reward_zero_std`,
        which counts batches instead of groups with `scale_rewards="batch"`.

        Returns:
            `tuple[np.ndarray, np.ndarray]`: steps and shares, both of shape `(n,)`.
        """
        steps, shares = self.series(f"{PREFIX}effective_ratio")
        if len(steps) > 0:
            return steps, shares
        steps, zero_variance = self.series("frac_reward_zero_std")
        return steps, 1 - zero_variance


def read_runs(paths: Sequence[str | Path], rollouts_per_step: int | None = None) -> list[RecordedRun]:
    """
    Read what several runs have left, and give them names that differ.

    Args:
        paths (`Sequence[str | Path]`): see [`read_run`].
        rollouts_per_step (`int`, *optional*): see [`read_run`].

    Returns:
        `list[RecordedRun]`: the runs, in order.

    Raises:
        [`UserError`]: see [`read_run`].
    """
    runs = [read_run(path, rollouts_per_step) for path in paths]
    names = shortest_names([run.path for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """
    Name each path by its last parts, as few as distinguish it from the others.

    Args:
        paths (`Sequence[Path]`): the paths as they were typed.

    Returns:
        `list[str]`: a name for each. Those of equal paths are equal.
    """
    parts = [_parts_with_name(path) for path in paths]
    names = []
    for i, own in enumerate(parts):
        others = parts[:i] + parts[i + 1 :]
        lengths = range(1, len(own) + 1)
        distinct = (n for n in lengths if all(own[-n:] != other[-n:] for other in others))
        length = next(distinct, len(own))
        names.append(Path(*own[-length:]).as_posix())
    return names


def _parts_with_name(path: Path) -> tuple[str, ...]:
    """The parts of a path as it was typed; of the absolute path if that was `.` or ends with `..`."""
    is_named = path.name not in ("", "..")
    return path.parts if is_named else path.resolve().parts


def read_run(path: str | Path, rollouts_per_step: int | None = None) -> RecordedRun:
    """
    Read what a run has left.

    Args:
        path (`str` or `Path`): its `output_dir`, a checkpoint, or the `trainer_state.json` of one.
        rollouts_per_step (`int`, *optional*): completions of a step of plain TRL, which does not log them.

    Returns:
        [`RecordedRun`]: the run.

    Raises:
        [`UserError`]: nothing of a run is there, a file is corrupt, or `rollouts_per_step` is not positive.
    """
    problem = number_problem("rollouts_per_step", rollouts_per_step, "[1, inf)", integer=True, none=True)
    if problem is not None:
        raise UserError(problem)
    folder = Path(path).expanduser()
    check_exists(folder)
    if not folder.is_dir() and not is_state_file(folder):
        raise UserError(f"{path} is not a folder. Give the `output_dir` of a run, or its `{STATE_FILE}`.")
    lines = read_logs(folder)
    if not lines:
        raise UserError(
            f"{folder} has no logs of a run yet, in `{METRICS_FILE}` or, of plain TRL, in a checkpoint's "
            f"`{STATE_FILE}`. Give an `output_dir`; a run logs every `logging_steps` steps."
        )
    logs = _with_axes(pd.DataFrame([_numbers(line) for line in lines]), rollouts_per_step)
    groups_file = folder / GROUPS_FILE
    groups = read_groups(groups_file).to_pandas() if groups_file.exists() else None
    return RecordedRun(folder, read_about(folder), logs, groups, name=folder.name)


def read_about(path: Path) -> dict[str, Any]:
    """
    Read what `run.json` says of a run.

    Args:
        path (`Path`): its `output_dir`, a checkpoint, or a file in one.

    Returns:
        `dict[str, Any]`: selector, model and number of prompts; empty without the file.

    Raises:
        [`UserError`]: the file is corrupt.
    """
    folder = path.parent if path.is_file() else path
    is_checkpoint = CHECKPOINT.fullmatch(folder.absolute().name)
    run_file = (folder.absolute().parent if is_checkpoint else folder) / RUN_FILE
    return _read_json(run_file) if run_file.exists() else {}


def _with_axes(logs: pd.DataFrame, rollouts_per_step: int | None) -> pd.DataFrame:
    """Logs with the columns `rollouts` and `time`, as far as they are known."""
    axes = {}
    generated = f"{PREFIX}rollouts_generated"
    if "rollouts" not in logs and generated in logs:  # a checkpoint of this package
        axes["rollouts"] = logs[generated]
    elif "rollouts" not in logs and rollouts_per_step:
        axes["rollouts"] = logs["step"] * rollouts_per_step
    if "step_time" in logs:
        axes["time"] = _time_of_training(logs)
    return logs.assign(**axes)


def _time_of_training(logs: pd.DataFrame) -> np.ndarray:
    """
    The seconds that training steps have taken until each log, by TRL's `step_time`: the mean of a step since the log
    before. Evaluations and checkpoints do not count.
    """
    timed = logs[["step", "step_time"]].dropna()
    steps = np.concatenate([[0], timed["step"]])
    seconds = np.cumsum(np.diff(steps) * timed["step_time"])
    return np.interp(logs["step"], steps, np.concatenate([[0], seconds]))


def check_exists(path: Path) -> None:
    """Raise a `UserError` if there is nothing at a path."""
    if not path.exists():
        raise UserError(f"There is no file or folder {str(path)!r}.")


def read_logs(path: Path) -> list[dict[str, Any]]:
    """
    Read what a run has logged.

    Args:
        path (`Path`): its `output_dir`, a checkpoint, or the `trainer_state.json` of one.

    Returns:
        `list[dict[str, Any]]`: the logs, in order; empty if there are none.

    Raises:
        [`UserError`]: a file is corrupt.
    """
    metrics = path / METRICS_FILE
    return read_metrics(metrics) if metrics.exists() else _log_history(path)


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a log."""
    return {name: value for name, value in line.items() if is_number(value)}


def is_state_file(path: Path) -> bool:
    """Whether a path is a `trainer_state.json`, or a copy of one such as `trainer_state (1).json`."""
    return path.is_file() and path.match(STATE_FILE.replace(".", "*."))


def _log_history(run: Path) -> list[dict[str, Any]]:
    """
    The logs in the Trainer's state; empty without any.

    Args:
        run (`Path`): a file of that state, or a folder which has one, itself or in a checkpoint; the latest checkpoint
            that has logs counts.
    """
    saved = sorted(run.glob(f"checkpoint-*/{STATE_FILE}"), key=_checkpoint_order, reverse=True)
    candidates = [run] if run.is_file() else [run / STATE_FILE, *saved]
    for path in candidates:
        if not path.exists():
            continue
        history = _read_json(path).get("log_history") or []
        logs = [log for log in history if isinstance(log.get("step"), int)]
        if logs:
            return logs
    return []


def _checkpoint_order(state_file: Path) -> tuple[int, Path]:
    """Sorts by steps: the name `checkpoint-9` is shorter than `checkpoint-10`, and so comes before it."""
    return len(state_file.parent.name), state_file


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it has another value."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is corrupt ({error}). Remove it, and try again.") from error
    return content if isinstance(content, dict) else {}


def summary(runs: Sequence[RecordedRun], width: int | None = None) -> str:
    """
    Make a table for the terminal, with a column of facts for each run.

    Args:
        runs (`Sequence[RecordedRun]`): the runs.
        width (`int`, *optional*): characters of a line; runs that do not fit follow in further tables.

    Returns:
        `str`: the table.
    """
    table = pd.DataFrame([facts(run) for run in runs], index=[run.name for run in runs])
    is_known = (table != "").any()
    rest = table.loc[:, is_known].T
    blocks = []
    while not rest.empty:
        num_runs = rest.shape[1]
        while num_runs > 1 and width is not None and _width(rest.iloc[:, :num_runs]) > width:
            num_runs -= 1
        blocks.append("\n".join(_lines(rest.iloc[:, :num_runs])))
        rest = rest.iloc[:, num_runs:]
    return "\n\n".join(blocks)


def _lines(table: pd.DataFrame) -> list[str]:
    return [line.rstrip() for line in table.to_string().splitlines()]


def _width(table: pd.DataFrame) -> int:
    return max(map(len, _lines(table)))


def facts(run: RecordedRun) -> dict[str, str]:
    """
    Say what happened in a run.

    Args:
        run ([`RecordedRun`]): the run.

    Returns:
        `dict[str, str]`: facts by what they are about; empty where its files do not tell.
    """
    last = run.last
    known = {
        "model": _short_model(run.about.get("model") or ""),
        "method": _method(run),
        "prompts": _formatted(run.about.get("prompts"), ",.0f"),
        "optimizer steps": _formatted(run.logs["step"].max(), ",.0f"),
        "rollouts generated": _formatted(last.get("rollouts"), ",.0f"),
        "rollouts replayed": _formatted(last.get(f"{PREFIX}rollouts_replayed"), ",.0f"),
        "rollouts dropped": _formatted(last.get(f"{PREFIX}rollouts_discarded"), ",.0f"),
        "effective groups": _formatted(_mean_effective_share(run), ".0%"),
        "tokens of the update": _formatted(_share_computed(run), ".0%", " of TRL's"),
        "time without evaluation": _duration(run, "step_time"),
        "time of the updates": _duration(run, f"{PREFIX}update/seconds"),
    }
    # The reward in training is one of selected prompts, of which a step has few
    known["reward in training"] = "" if run.held_out else _reward_in_training(run)
    known["held-out reward"] = _ends(run, run.held_out)
    return known


def _reward_in_training(run: RecordedRun) -> str:
    """Show how the reward began and ended, or why not; empty if it was not logged."""
    steps, _ = run.series("reward")
    if len(steps) == 0:
        return ""
    too_short = f"fewer than {2 * STEPS_OF_AN_END} steps" if steps[-1] < 2 * STEPS_OF_AN_END else "too few logs"
    return _ends(run, "reward", STEPS_OF_AN_END) or too_short


def _method(run: RecordedRun) -> str:
    """The methods of a run of this package, as short as the columns of a table; plain TRL does not record them."""
    if not run.is_ours:
        return ""
    highest = dict(run.logs.max().dropna())
    return ", ".join(method.removesuffix(" selection") for method in methods_used(run.about, highest))


def _short_model(name: str) -> str:
    """The owner and the name of a model on the Hub; of a path, its last two parts."""
    parts = Path(name).parts
    return Path(*parts[-2:]).as_posix() if parts else ""


def _formatted(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit


def _mean_effective_share(run: RecordedRun) -> float | None:
    _, shares = run.effective_share()
    return float(shares.mean()) if len(shares) > 0 else None


def _share_computed(run: RecordedRun) -> float | None:
    """
    Tokens that the updates of a run computed, as a share of those that TRL's would, as in the run's last line; `None`
    if none were logged. Logs have means over the steps since the log before.
    """
    tokens = f"{PREFIX}update/tokens"
    saved = f"{PREFIX}update/tokens_saved"
    logs = run.logs.reindex(columns=["step", tokens, saved]).dropna()
    if logs.empty:
        return None
    num_steps = np.diff(logs["step"], prepend=0)
    computed = num_steps * logs[tokens]
    of_trl = computed / (1 - logs[saved])
    return float(computed.sum() / of_trl.sum())


def _duration(run: RecordedRun, metric: str) -> str:
    """A time of the whole run, by its mean in a step; empty without one. TRL logs that of training, and no other."""
    steps, seconds_per_step = run.series(metric)
    if len(steps) == 0:
        return ""
    seconds = seconds_per_step.mean() * steps[-1]
    if 60 <= round(seconds) < 600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    unit, seconds_of_unit = unit_of_time(seconds)
    form = ",.1f" if unit == "h" else ".0f"
    return f"{seconds / seconds_of_unit:{form}} {unit}"


def unit_of_time(seconds: float) -> tuple[str, int]:
    """The unit in which a time is shown, and its seconds."""
    if round(seconds) < 60:
        return "s", 1
    if round(seconds / 60) < 60:
        return "min", 60
    return "h", 3600


def _ends(run: RecordedRun, metric: str, least_steps: int = 1) -> str:
    """
    Show how a metric began and ended.

    Args:
        run ([`RecordedRun`]): the run.
        metric (`str`): name of the metric.
        least_steps (`int`, *optional*, defaults to 1): optimizer steps that each of the two means covers at least.

    Returns:
        `str`: means of the first and the last tenth; empty without the metric, or if means over several steps would
        overlap.
    """
    steps, values = run.series(metric)
    num_logs = len(values)
    if num_logs == 0:
        return ""
    steps_per_log = steps[-1] / num_logs
    # The only evaluation may be the one before the first step
    least_logs = math.ceil(least_steps / steps_per_log) if steps_per_log > 0 else num_logs
    count = max(least_logs, num_logs // 10)
    if least_steps > 1 and 2 * count > num_logs:  # a single evaluation is shown
        return ""
    return f"{values[:count].mean():.3f} to {values[-count:].mean():.3f}"
