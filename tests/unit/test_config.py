"""Flags, the YAML file and the schema are one thing."""

import argparse

import pytest

from wandistill import config
from wandistill.config import TrainConfig
from wandistill.errors import ConfigError

SEED_FLAGS = [
    "--teacher_path x",
    "--student_config half",
    "--data_path p.txt",
    "--output_dir o",
    "--num_epochs 2",
    "--batch_size 2",
    "--lr 1e-5",
    "--distributed",
    "--teacher_device_strategy cpu",
    "--teacher_on_cpu",
    "--balanced_teacher",
    "--balance_teacher",
    "--sequential_teacher",
    "--share_teacher",
    "--teacher_rank 1",
    "--teacher_device_map map.json",
    "--teacher_dtype float16",
    "--mixed_precision bf16",
    "--gradient_checkpointing",
    "--gradient_accumulation_steps 4",
    "--save_samples",
    "--sample_prompts p.txt",
    "--sample_interval 10",
    "--sample_dir s",
    "--resume latest",
    "--max_steps 5",
    "--seed 1",
]


def parse(*flags: str) -> TrainConfig:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    return config.from_arguments(parser.parse_args(list(flags)))


@pytest.mark.parametrize("flag", SEED_FLAGS)
def test_every_flag_of_the_seed_is_known_with_underscores_and_hyphens(flag):
    name, *value = flag.split()
    assert parse(name, *value) == parse("--" + name[2:].replace("_", "-"), *value)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("batch-size: 7\nlr: 1.0e-3\ngradient_checkpointing: true\n")
    resolved = parse("--config", str(file), "--lr", "5e-4")
    assert (resolved.batch_size, resolved.lr, resolved.gradient_checkpointing) == (7, 5e-4, True)
    assert resolved.seed == TrainConfig().seed


@pytest.mark.parametrize(
    ("alias", "strategy"),
    [
        ("--teacher_on_cpu", "cpu"),
        ("--balanced_teacher", "balanced"),
        ("--balance-teacher", "balanced"),
        ("--sequential_teacher", "sequential"),
    ],
)
def test_the_old_placement_flags_are_the_strategy(alias, strategy):
    assert parse(alias).teacher_device_strategy == strategy


def test_an_old_flag_that_contradicts_the_strategy_names_both():
    with pytest.raises(ConfigError, match=r"teacher_on_cpu.*gpu0"):
        parse("--teacher_on_cpu", "--teacher_device_strategy", "gpu0")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch_size", "0"], ["batch_size", "0", "at least 1"]),
        (["--batch_size", "two"], ["batch_size", "two", "whole number"]),
        (["--batch_size", "1.5"], ["1.5", "whole number"]),
        (["--lr", "nan"], ["lr", "nan", "number"]),
        (["--lr", "-1"], ["lr", "above 0"]),
        (["--ema_decay", "1"], ["ema_decay", "below 1"]),
        (["--resolution", "480p"], ["480p", "WIDTHxHEIGHT"]),
        (["--objective", "l1"], ["l1", "velocity_normalized"]),
        (["--max_steps", "-1"], ["max_steps", "-1", "negative"]),
    ],
)
def test_a_bad_value_is_named_with_its_rule(flags, words):
    with pytest.raises(ConfigError) as error:
        parse(*flags)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batchsize: 3", ["batchsize", "batch_size"]),
        ("- a list", ["list"]),
        ("lr: [1]", ["lr"]),
        ("lr: {", ["not YAML"]),
        ("batch_size: true", ["batch_size", "whole number"]),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path, text, words):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse("--config", str(file))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_numbers_arrive_as_written(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("seed: 4294967295\nlr: 1e-5\nmax_steps: 1000000\n")
    resolved = parse("--config", str(file))
    assert (resolved.seed, resolved.lr, resolved.max_steps) == (4294967295, 1e-5, 1_000_000)


def test_resident_blocks_are_a_number_or_left_to_the_plan():
    assert parse().kept_blocks is None and parse("--resident_blocks", "auto").kept_blocks is None
    assert parse("--resident_blocks", "0").kept_blocks == 0
    assert config.from_mapping({"resident_blocks": 12}).kept_blocks == 12
    for wrong in ("-1", "all", "1.5"):
        with pytest.raises(ConfigError, match=f"--resident_blocks {wrong}: must be a whole number, or auto"):
            parse(f"--resident_blocks={wrong}")


def test_the_schema_has_every_setting_and_nothing_else():
    schema = config.json_schema()
    assert set(schema["properties"]) == set(config.FIELDS)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["teacher_device_strategy"]["enum"] == list(config.PLACEMENTS)


def test_help_has_every_flag():
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    text = parser.format_help()
    assert all(f"--{name}" in text for name in config.FIELDS)
