"""A values file is checked against one tree, which also gives the chart's schema."""

import json
from pathlib import Path

import pytest

from wandistill.errors import ConfigError
from wandistill.kube import values
from wandistill.kube.gojson import to_json


def test_defaults_are_complete_and_pass_their_own_check():
    resolved = values.resolve()
    assert resolved["teacher"]["model"] == "embedded"
    assert resolved["pools"] == {}


def test_a_pool_is_filled_with_the_defaults_of_a_pool():
    pool = values.resolve({"pools": {"main": {"nodes": 2}}})["pools"]["main"]
    assert (pool["nodes"], pool["placement"], pool["gpuResource"]) == (2, "auto", "nvidia.com/gpu")


def test_later_layers_win_key_by_key_and_null_removes():
    first = {"training": {"lr": 1e-4, "seed": 1}, "pools": {"main": {"nodes": 2}}}
    resolved = values.resolve(first, {"training": {"seed": None}, "pools": {"main": {"gpusPerNode": 0}}})
    assert resolved["training"] == {"lr": 1e-4}
    assert resolved["pools"]["main"]["nodes"] == 2


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"traning": {}}, "traning: is not a key; did you mean 'training'?"),
        ({"teacher": {"modle": "x"}}, "teacher.modle: is not a key; did you mean 'model'?"),
        ({"pools": {"main": {"gpuPerNode": 1}}}, "pools.main.gpuPerNode: is not a key; did you mean 'gpusPerNode'?"),
        ({"topology": "both"}, "topology: 'both' is not one of single, independent, teacher-and-students."),
        ({"pools": {"main": {"nodes": 0}}}, "pools.main.nodes: 0 must be at least 1."),
        ({"pools": {"main": {"nodes": True}}}, "pools.main.nodes: true is not a whole number."),
        ({"data": {"prompts": "a cat"}}, "data.prompts: 'a cat' is not a list."),
        ({"image": {"train": {"digest": "abc"}}}, "image.train.digest: 'abc' is not of the form"),
        ({"output": {"create": {"accessModes": ["RWX"]}}}, "output.create.accessModes[0]: 'RWX' is not one of"),
        ({"pools": {"main": {"placement": "tpu"}}}, "pools.main.placement: 'tpu' is not one of cpu, gpu"),
    ],
)
def test_what_the_tree_does_not_know_is_refused_with_its_path(given, sentence):
    with pytest.raises(ConfigError) as caught:
        values.resolve(given)
    assert sentence in str(caught.value)


def test_a_file_is_read_as_helm_reads_it(tmp_path: Path):
    file = tmp_path / "values.yaml"
    file.write_text("training: {lr: 1e-5, max_steps: 1000000, seed: 4294967295}\n")
    training = values.load(file)["training"]
    assert training == {"lr": 1e-5, "max_steps": 1000000, "seed": 4294967295}
    assert isinstance(training["lr"], float)


def test_a_file_that_is_no_map_is_refused(tmp_path: Path):
    file = tmp_path / "values.yaml"
    file.write_text("- a\n")
    with pytest.raises(ConfigError, match="holds a list, but must map keys to values"):
        values.load(file)


def test_the_schema_refuses_unknown_keys_and_knows_the_settings_of_the_trainer():
    schema = values.schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["training"]["properties"]["lr"]["type"] == ["number", "null"]
    assert schema["properties"]["pools"]["additionalProperties"]["additionalProperties"] is False
    json.dumps(schema)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1000000, "1000000"),
        (1000000.0, "1000000"),
        (1e-5, "0.00001"),
        (1e-7, "1e-7"),
        (1.5e-9, "1.5e-9"),
        (1e21, "1e+21"),
        (123456.789, "123456.789"),
        (-0.5, "-0.5"),
        (True, "true"),
        (None, "null"),
        ("<a & b>", '"\\u003ca \\u0026 b\\u003e"'),
        ("ü", '"ü"'),
        ({"b": 1, "a": [1, "x"]}, '{"a":[1,"x"],"b":1}'),
    ],
)
def test_json_is_written_as_go_writes_it(value, written):
    assert to_json(value) == written
