"""Progress is a line of JSON in a pod, where `wandistill status` reads it, and a line for people elsewhere."""

import io
import json

from wandistill.kube.progress import of_log
from wandistill.train.progress import POD, Progress


def lines(monkeypatch, pod):
    if pod:
        monkeypatch.setenv(POD, "my-run-main-12345678")
    else:
        monkeypatch.delenv(POD, raising=False)
    stream = io.StringIO()
    progress = Progress("training", 4, every=0, stream=stream)
    for step in range(1, 4):
        progress.update(text=f"loss {1 / step:.2f}", figures=lambda step=step: {"loss": 1 / step, "gpu_bytes": 5})
    return stream.getvalue().splitlines()


def test_a_pod_s_line_is_read_back_by_status(monkeypatch):
    told = lines(monkeypatch, pod=True)
    assert len(told) == 3
    found = of_log("plan: stream\n" + "\n".join(told) + "\nsomething else\n")
    assert (found.what, found.done, found.total, found.loss) == ("training", 3, 4, 1 / 3)
    assert found.seconds_left is not None and found.memory == {"gpu_bytes": 5}
    assert json.loads(told[0])["schema"] == 1


def test_elsewhere_it_is_for_people(monkeypatch):
    assert lines(monkeypatch, pod=False)[1].startswith("training 2/4 loss 0.50, ")


def test_what_is_found_by_looking_is_told_as_it_is(monkeypatch):
    monkeypatch.setenv(POD, "x")
    stream = io.StringIO()
    progress = Progress("teacher MiB", 0, every=0, stream=stream)
    progress.tell(12, 126)
    assert of_log(stream.getvalue()).seconds_left is None, "they were there before"
    progress.tell(40, 126)
    assert str(of_log(stream.getvalue())).startswith("teacher MiB 40/126, ")
