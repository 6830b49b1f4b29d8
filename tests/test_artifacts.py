"""A folder's manifest never describes what another run of the stage left there."""

import errno

import pytest

from spectrain import artifacts
from spectrain.artifacts import MANIFEST, alone, reuse_or_run


def test_a_folder_left_half_made_by_other_settings_is_not_reused(tmp_path):
    """Made with a, then killed while b is made: going back to a makes it again."""
    file = tmp_path / "content"

    def make(text):
        def write():
            file.write_text(text)
            return {}

        return write

    def killed():
        file.write_text("half of b")
        raise KeyboardInterrupt

    assert reuse_or_run(tmp_path, "a", make("a")) is False
    assert reuse_or_run(tmp_path, "a", make("a")) is True
    with pytest.raises(KeyboardInterrupt):
        reuse_or_run(tmp_path, "b", killed)
    assert not (tmp_path / MANIFEST).exists()
    assert reuse_or_run(tmp_path, "a", make("a")) is False
    assert file.read_text() == "a"


def test_one_lock_is_held_once_and_can_be_held_again_after_an_error(tmp_path):
    lock = tmp_path / "run" / ".lock"
    held = pytest.raises(ValueError, match=r"run/\.lock: another command is at work in this folder")
    with pytest.raises(KeyError), alone(lock):
        with held, alone(lock):
            pass
        raise KeyError
    with alone(lock):
        pass


def test_a_file_system_without_locks_is_named_and_the_work_is_done(tmp_path, monkeypatch, caplog):
    def flock(file, flags):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(artifacts.fcntl, "flock", flock)
    with alone(tmp_path / ".lock"):
        pass
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/.lock: no locks on its file system")
