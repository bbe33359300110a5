"""Making the embedded teacher: the tiny recipe runs every stage."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from wandistill.demo.model_card import model_card
from wandistill.demo.train_teacher import main
from wandistill.demo.training import Schedule, adamw, train
from wandistill.demo.transformer_training import TimeRange


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    assert (
        main(["--tiny", "--output_dir", str(folder / "out"), "--work_dir", str(folder / "work"), "--device", "cpu"])
        == 0
    )
    return folder


def test_a_tiny_training_packs_a_pipeline_that_diffusers_loads(made: Path):
    pipeline = WanPipeline.from_pretrained(made / "out" / "teacher")
    assert pipeline.config.boundary_ratio == 0.875
    assert pipeline.transformer_2 is not None
    assert pipeline.tokenizer("a small red circle").input_ids == [3, 24, 9, 6, 1]
    assert pipeline.vae.config.latents_mean == json.loads((made / "work" / "vae.json").read_text())["latents_mean"]
    assert (made / "out" / "judge.safetensors").exists()


def test_its_model_card_says_that_it_is_tiny(made: Path):
    record = json.loads((made / "out" / "teacher" / "training.json").read_text())
    card = (made / "out" / "teacher" / "README.md").read_text()
    assert card == model_card(record)
    assert "Made with `--tiny`" in card
    assert "CPU" in card and torch.__version__ in card


def test_a_second_run_makes_no_finished_stage_again(made: Path, capsys: pytest.CaptureFixture[str]):
    before = {file: file.stat().st_mtime_ns for file in (made / "work").glob("*.safetensors")}
    # As if the first run had been stopped within the last stage, whose tensors were half written.
    (made / "work" / "expert_low.json").unlink()
    (made / "work" / "expert_low.safetensors").write_bytes(b"torn")
    arguments = ["--tiny", "--output_dir", str(made / "again"), "--work_dir", str(made / "work"), "--device", "cpu"]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    for stage in ("judge", "vae", "latents", "transformer", "expert_high"):
        assert f"{stage}: done before" in said
        assert (
            before[made / "work" / f"{stage}.safetensors"]
            == (made / "work" / f"{stage}.safetensors").stat().st_mtime_ns
        )
    assert "expert_low: starts" in said
    weights = "teacher/transformer_2/diffusion_pytorch_model.safetensors"
    assert (made / "again" / weights).read_bytes() == (made / "out" / weights).read_bytes()


def test_stages_of_another_recipe_are_refused(made: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--tiny", "--seed", "1", "--output_dir", str(made / "other"), "--work_dir", str(made / "work")]
    assert main(arguments) == 2
    assert "another recipe or seed" in capsys.readouterr().err
    assert not (made / "other").exists()


def test_evaluating_a_folder_without_a_pipeline_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["--evaluate", str(tmp_path)])
    assert stopped.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_the_schedule_warms_up_stays_and_decays():
    schedule = Schedule(steps=100, peak=2.0, warmup_steps=10, constant_share=0.5)
    rates = [schedule(i) for i in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[10:50] == [2.0] * 40
    assert rates[75] == pytest.approx(1.0)
    assert rates == sorted(rates[:10]) + rates[10:50] + sorted(rates[50:], reverse=True)
    assert rates[-1] >= 0.02


def test_training_stops_at_a_loss_that_is_not_finite():
    weight = torch.nn.Parameter(torch.ones(()))
    schedule = Schedule(steps=3, peak=1e-3, warmup_steps=1, constant_share=1.0)
    with pytest.raises(FloatingPointError, match="some stage: the loss is not finite at step 3"):
        train("some stage", schedule, adamw([weight], (0.9, 0.99), 0.0), lambda i: weight * float("nan"), print)


def test_times_are_drawn_within_the_experts_range_and_shifted():
    generator = torch.Generator().manual_seed(0)
    high = TimeRange(0.875, 1.0, shift=3.0).sample(4_000, generator)
    assert high.min() >= 0.875 - 1e-6 and high.max() <= 1
    everything = TimeRange(0.0, 1.0, shift=3.0).sample(20_000, generator)
    # The share of uniform steps above boundary b is 1 - b / (k - (k - 1) b).
    assert (everything > 0.875).float().mean().item() == pytest.approx(1 - 0.875 / (3 - 2 * 0.875), abs=0.01)
