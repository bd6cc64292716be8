"""The command as a whole: help without PyTorch, error texts, exit statuses."""

import signal
import subprocess
import sys

import pytest
import torch

from swin_lessons import __version__
from swin_lessons.cli import build_parser, command_modules, main

COMMANDS = command_modules()


def test_help_does_not_import_pytorch():
    code = (
        "import sys\nfrom swin_lessons.cli import main\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: swin-lessons train" in done.stdout


def test_module_runs_as_the_command():
    command = [sys.executable, "-m", "swin_lessons", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"swin-lessons {__version__}\n"


def test_every_module_is_a_command():
    assert {"data", "doctor", "train"} <= set(COMMANDS)
    text = build_parser().format_help()
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_reads_like_a_page(name, capsys):
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    page = capsys.readouterr().out
    assert done.value.code == 0
    assert "examples:" in page
    assert f"swin-lessons {name}" in page.split("examples:")[1]
    assert max(map(len, page.splitlines())) <= 110


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "usage: swin-lessons" in capsys.readouterr().err


def test_expected_errors_are_one_line_with_status_2(capsys):
    assert main(["train", "--model", "swin_micro_fmnis", "--data", "digits"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("swin-lessons train: there is no model 'swin_micro_fmnis'; did you mean")
    assert error.count("\n") == 1


def test_more_memory_than_there_is_is_one_line(capsys):
    assert main(["profile", "swin_micro_fmnist", "--batch", "100000000000000"]) == 2
    message = "not enough memory for 381,469,726.6 GiB more; use a smaller --batch or --img-size"
    assert capsys.readouterr().err == f"swin-lessons profile: {message}\n"


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (
            MemoryError("Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000)"),
            " for 7.28 TiB more",
        ),
        (MemoryError(), ""),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0"),
            " for 20.00 GiB more",
        ),
        (RuntimeError("Storage size calculation overflowed with sizes=[10]"), ""),
    ],
)
def test_each_library_s_want_of_memory_is_recognised(error, size, monkeypatch, capsys):
    fail_as(error, monkeypatch, interrupted=False)
    assert main(["doctor"]) == 2
    message = f"swin-lessons doctor: not enough memory{size}; close other programs\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "command", ["train --model swin_micro_fmnist --data digits", "profile swin_micro_fmnist"]
)
@pytest.mark.parametrize("side", ["1000000", "4097", "x"])
def test_too_large_an_image_is_refused_early(command, side, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), "--img-size", side])
    reason = "use a whole number of px up to 4,096; memory grows with its square"
    assert f"argument --img-size: '{side}': {reason}" in capsys.readouterr().err


def test_steps_and_epochs_exclude_each_other(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--model", "swin_micro_fmnist", "--data", "digits", "--epochs", "1", "--steps", "3"])
    assert "--steps: not allowed with argument --epochs" in capsys.readouterr().err


def test_help_says_what_a_large_window_becomes(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    page = " ".join(capsys.readouterr().out.split())
    assert "a window larger than the map shrinks to it" in page
    assert "takes the place of --epochs" in page


def test_traceback_on_request():
    with pytest.raises(ValueError, match="there is no model"):
        main(["--traceback", "train", "--model", "no", "--data", "digits"])


def test_bugs_keep_their_traceback(monkeypatch):
    from swin_lessons.cli import doctor

    monkeypatch.setattr(doctor, "extras", lambda: 1 / 0 if False else [].undefined)
    with pytest.raises(AttributeError):
        main(["doctor"])


def test_bench_names_what_it_cannot_write(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    for out, message in (
        (tmp_path, f"{tmp_path} is a folder: name a file, such as {tmp_path / 'bench.json'}"),
        (tmp_path / "file" / "x.json", "file is a file, not a folder"),
    ):
        assert main(["bench", "--quick", "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def fail_as(error: BaseException, monkeypatch, *, interrupted: bool):
    """`swin-lessons doctor` that ends with an error, or with what a library makes of Ctrl-C."""

    def run(args):
        try:
            if interrupted:
                signal.raise_signal(signal.SIGINT)
        finally:
            raise error

    monkeypatch.setattr("swin_lessons.cli.doctor.run", run)


@pytest.fixture
def heard():
    """Ctrl-C as in a terminal; whoever starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RecursionError(), ImportError("half imported")])
def test_an_interrupt_is_one_whatever_a_library_makes_of_it(error, monkeypatch, capsys):
    fail_as(error, monkeypatch, interrupted=True)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_without_an_interrupt_stays_one(monkeypatch):
    fail_as(RecursionError(), monkeypatch, interrupted=False)
    with pytest.raises(RecursionError):
        main(["doctor"])


def test_warnings_are_one_line_notes():
    code = (
        "import sys, warnings\nfrom swin_lessons import cli\nfrom swin_lessons.cli import doctor\n"
        "doctor.run = lambda args: warnings.warn('mind the gap')\ncli.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run([*command, "doctor"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "swin-lessons doctor: note: mind the gap\n"
    done = subprocess.run(
        [*command, "--traceback", "doctor"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "UserWarning: mind the gap" in done.stderr
