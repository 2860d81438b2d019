"""The model card: what TRL writes, and what the run did."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.factories import RUNS, mixed_reward, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.analysis.report import method
from trl_dataeff.tracking.figures import plots_of
from trl_dataeff.tracking.model_card import TITLE, complete_card, describe_run, used
from trl_dataeff.tracking.recorded import read_run


CARD = """# Model Card for made

This model is a fine-tuned version of [None](https://huggingface.co/None).

### Framework versions

- TRL: 1.16.0

## Citations
"""


def described(folder, name: str, text: str = CARD) -> str:
    (folder / "README.md").write_text(text)
    complete_card(folder / "README.md", read_run(RUNS / name), base_model="tiny", draws=False)
    return (folder / "README.md").read_text()


def test_method_data_settings_and_papers(tmp_path):
    text = described(tmp_path, "dots-0")
    assert text.index(TITLE) < text.index("### Framework versions") < text.index("Cite the methods")
    assert "fine-tuned version of `tiny`" in text
    assert "DOTS), 50% of each batch replayed" in text
    assert "| prompts in the dataset | 360 |" in text
    assert "| held-out reward, first and last | 0.2" in text
    assert "learning_rate: 0.004" in text
    assert "make_runs.py tests/data/runs" in text
    assert "2506.05316" in text
    assert "2503.14476" not in text, "only papers of what was used"
    for word in ("None", "nan", "More Information Needed"):
        assert word not in text


def test_methods_and_their_papers(tmp_path):
    assert {"2506.05316", "2506.02177", "2503.14476"} <= set(described(tmp_path, "dapo").replace("}", ":").split(":"))
    text = described(tmp_path, "uniform-0")
    assert "GRPO with prompts selected uniformly" in text
    assert "Cite the methods" not in text


def test_every_method_that_is_on_is_named():
    run_of = read_run(RUNS / "uniform-0")
    run_of.about["arguments"] |= {
        "advantage_baseline": "tracked",
        "sequential_rollouts": True,
        "dynamic_sampling": True,
    }
    words = ", ".join(used(run_of).values())
    for name in ("tracked baseline", "stopped after half", "dynamic sampling"):
        assert name in words
    for name in ("tracked baseline", "sequential rollouts", "dynamic sampling"):
        assert name in method(run_of)
    (kinds,) = (plot for plot in plots_of(run_of) if plot.name == "kinds")
    assert "Only effective groups" not in kinds.note


def test_a_card_without_the_heading_gets_the_section_at_its_end(tmp_path):
    assert TITLE in described(tmp_path, "dots-0", "# My card\n")


def test_without_a_run_the_card_stays(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    describe_run(tmp_path, base_model="tiny", draws=True)
    assert (tmp_path / "README.md").read_text() == CARD


def test_figures_are_drawn_beside_the_card(tmp_path):
    pytest.importorskip("matplotlib")
    folder = shutil.copytree(RUNS / "dots-0", tmp_path / "run")
    (folder / "README.md").write_text(CARD)
    describe_run(folder, base_model="tiny", draws=True)
    text = (folder / "README.md").read_text()
    assert "](figures/progress-rollouts.png)" in text
    assert (folder / "figures" / "kinds.png").stat().st_size > 1000


def test_saving_a_model_writes_its_card(tmp_path):
    options = {"selection": "greso", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "out", rewards=mixed_reward, **options)
    assert TITLE in (tmp_path / "out" / "README.md").read_text(), "with each checkpoint"
    trainer.save_model(str(tmp_path / "model"))
    text = (tmp_path / "model" / "README.md").read_text()
    assert text.count(TITLE) == 1
    assert "2506.02177" in text
    assert "| optimizer steps | 4 |" in text
    assert "trl-dataeff" in text.split("---")[1], "tags"


def test_the_card_and_its_figures_are_pushed(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pushed = {}

    class Hub:
        def create_repo(self, name, **options):
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, *, repo_id, folder_path, ignore_patterns, **options):
            paths = [path.relative_to(folder_path) for path in Path(folder_path).rglob("*") if path.is_file()]
            ignored = [pattern for pattern in ignore_patterns if any(path.match(pattern) for path in paths)]
            pushed.update(repo=repo_id, files=set(map(str, paths)), ignored=ignored)

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "mine", max_steps=2).push_to_hub(
        dataset_name="d"
    )
    assert pushed["repo"] == "me/mine"
    assert {"README.md", "model.safetensors", "figures/progress-rollouts.png", "figures/flow.png"} <= pushed["files"]
    assert pushed["ignored"] == [], "nothing of the card is left out"
    text = (tmp_path / "mine" / "README.md").read_text()
    assert TITLE in text
    assert "](figures/progress-rollouts.png)" in text
    assert "datasets/d" in text, "what the caller names is in TRL's own part"
