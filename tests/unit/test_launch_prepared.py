"""A run waits for the mark of `wandistill prepare`, which is tied to its inputs, or says what fills the caches."""

import dataclasses
import json
import os
import signal
import threading
import time

import pytest

from wandistill.config import TrainConfig
from wandistill.errors import ConfigError, Terminated
from wandistill.launch import prepared


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "_LOOK", 0.02)
    (tmp_path / "prompts.txt").write_text("a cat\n")
    return TrainConfig(output_dir=str(tmp_path / "run"), data_path=str(tmp_path / "prompts.txt"))


def fail(config, times=1):
    for _ in range(times):
        with pytest.raises(ConfigError), prepared.marked(config):
            raise ConfigError("the hub cannot be reached")


def test_a_run_waits_until_the_mark_is_there(config, capsys):
    def prepare():
        time.sleep(0.3)
        with prepared.marked(config):
            pass

    thread = threading.Thread(target=prepare)
    thread.start()
    began = time.monotonic()
    prepared.wait(config, 60)
    thread.join()
    assert time.monotonic() - began > 0.2
    line = json.loads(capsys.readouterr().err.splitlines()[0])
    assert (line["progress"], line["total"]) == (prepared.WAITING, 60)
    prepared.wait(config, 1)


def test_other_inputs_have_another_mark(config, tmp_path):
    path = prepared.mark_path(config)
    for name, value in (("teacher_revision", "v1"), ("negative_prompt", "blurred"), ("teacher_dtype", "bfloat16")):
        assert prepared.mark_path(dataclasses.replace(config, **{name: value})) != path
    assert prepared.mark_path(dataclasses.replace(config, lr=1.0, max_steps=3)) == path
    (tmp_path / "prompts.txt").write_text("a dog\n")
    assert prepared.mark_path(config) != path


def test_without_a_mark_the_run_ends_with_the_command_that_makes_it(config, monkeypatch):
    monkeypatch.setenv("WANDISTILL_RUN", "my-run-main-12345678")
    with pytest.raises(ConfigError) as caught:
        prepared.wait(config, 0)
    assert "'kubectl logs job/my-run-main-12345678-prepare' says why" in str(caught.value)
    assert "'wandistill prepare --only embeddings' with the settings of this run fills them" in str(caught.value)


def test_what_failed_is_tried_again_and_then_ends_the_run_with_its_reason(config, monkeypatch):
    monkeypatch.setattr(prepared, "_OLD_SECONDS", 0.0)
    fail(config, prepared.TRIES - 1)
    with pytest.raises(ConfigError, match="are not there after 0 s"):
        prepared.wait(config, 0)
    fail(config)
    with pytest.raises(ConfigError, match="wandistill prepare failed 4 times, the last one with: the hub cannot"):
        prepared.wait(config, 60)
    fail(config)
    with prepared.marked(config):
        pass
    prepared.wait(config, 1)


def test_an_error_of_an_earlier_release_is_not_taken_for_one_of_now(config):
    fail(config, prepared.TRIES)
    timer = threading.Timer(0.3, lambda: fail(config))
    timer.start()
    with pytest.raises(ConfigError, match="are not there after 1 s"):
        prepared.wait(config, 1)
    timer.join()


def test_a_signal_ends_the_wait(config):
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Terminated, match="nothing was begun"):
        prepared.wait(config, 60)
    timer.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
