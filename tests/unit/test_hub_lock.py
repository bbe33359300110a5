"""One process of all that share a cache downloads; the others take what it made."""

import threading
import time

from wandistill.models import hub_lock
from wandistill.models.hub_lock import fetched_once, told


def test_of_several_that_ask_at_once_one_downloads(tmp_path):
    made, found = [], []

    def download():
        made.append(1)
        time.sleep(0.2)
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        return tmp_path / "snapshot"

    def ask():
        found.append(fetched_once(tmp_path / "cache" / "lock", download))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(made) == 1 and found == [tmp_path / "snapshot"] * 4
    fetched_once(tmp_path / "cache" / "lock", download)
    assert len(made) == 2, "one that did not wait asks the hub, whose branch may have moved"


def test_after_a_download_that_failed_the_next_in_line_downloads(tmp_path):
    lock, began, made = tmp_path / "lock", threading.Event(), []

    def fail():
        began.set()
        time.sleep(0.2)
        raise OSError("no route")

    def first():
        try:
            fetched_once(lock, fail)
        except OSError:
            made.append("failed")

    thread = threading.Thread(target=first)
    thread.start()
    began.wait(timeout=10)
    assert fetched_once(lock, lambda: tmp_path) == tmp_path
    thread.join(timeout=10)
    assert made == ["failed"]


def test_a_cache_that_cannot_be_written_is_used_without_a_lock(tmp_path):
    (tmp_path / "file").touch()
    assert fetched_once(tmp_path / "file" / "lock", lambda: tmp_path) == tmp_path


def test_the_size_of_a_growing_folder_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_lock, "_TELL_SECONDS", 0.02)
    heard, enough = [], threading.Event()

    def tell(there, whole):
        heard.append((there, whole))
        if there >= 2:
            enough.set()

    with told(tmp_path, lambda: 4 << 20, tell):
        (tmp_path / "a").write_bytes(b"x" * (2 << 20))
        assert enough.wait(timeout=10)
    assert heard[-1] == (2, 4)
    with told(tmp_path, lambda: 1 // 0, tell):
        pass
