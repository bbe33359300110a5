"""A GPU driver that is too old for torch's CUDA is refused with both versions before anything starts."""

import pytest

from wandistill.errors import ExitCode
from wandistill.launch import command, driver
from wandistill.launch.driver import Driver, check_driver


def test_a_driver_of_an_older_cuda_release_is_refused_with_both_versions():
    with pytest.raises(Exception, match=r"driver 535.104.05 runs CUDA 12.2, .* built for CUDA 13.0: install") as caught:
        check_driver(lambda: Driver("535.104.05", (12, 2)), lambda: (13, 0))
    assert caught.value.exit_code == ExitCode.BAD_CONFIG == 2
    assert "driver 580 or newer" in str(caught.value)


@pytest.mark.parametrize(
    ("there", "built"),
    [
        (Driver("580.65.06", (13, 0)), (13, 2)),  # within a release every minor version runs
        (Driver("580.65.06", (13, 0)), (12, 8)),
        (None, (13, 0)),
        (Driver("535.104.05", (12, 2)), None),
    ],
    ids=["a newer minor", "an older CUDA", "no driver", "a torch for CPUs"],
)
def test_other_drivers_and_machines_without_one_are_not_refused(there, built):
    check_driver(lambda: there, lambda: built)


def test_the_cuda_of_torch_is_read_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(driver.importlib.util.sys.modules, "torch", raising=False)
    (package / "version.py").write_text(
        "__version__ = '2.15'\ncuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n"
    )
    assert driver.torch_cuda() == (13, 2)
    (package / "version.py").write_text("cuda: Optional[str] = None\n")
    assert driver.torch_cuda() is None


def test_launch_looks_at_the_driver_unless_the_run_is_on_the_cpu(tmp_path, monkeypatch, capsys):
    from wandistill.cli import main

    def refuse():
        check_driver(lambda: Driver("470.1", (11, 4)), lambda: (13, 0))

    class Started(Exception):
        """The launcher would have started the ranks."""

    def started(*arguments, **options):
        raise Started

    monkeypatch.setattr(command, "check_driver", refuse)
    monkeypatch.setattr(command, "Launcher", started)
    assert main(["launch", "--nproc", "1", "--", "--output_dir", str(tmp_path)]) == 2
    assert "driver 470.1 runs CUDA 11.4" in capsys.readouterr().err
    assert main(["launch", "--nproc", "1", "--", "--device", "cpu", "--output_dir", str(tmp_path)]) == 70
    assert "Started" in capsys.readouterr().err
