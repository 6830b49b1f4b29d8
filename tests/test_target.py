"""A target that cannot be loaded is told in one line that names the key."""

import pytest

from spectrain import target as module
from spectrain.config import TargetConfig
from spectrain.target import load_target


def test_a_hub_id_that_does_not_exist_is_one_line(monkeypatch):
    words = "me/no-such-model is not a local folder and is not a valid model identifier\nIs it private?"

    def fail(*args, **settings):
        raise OSError(words)

    monkeypatch.setattr(module.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(ValueError) as error:
        load_target(TargetConfig(path="me/no-such-model"))
    assert str(error.value) == f"target.path='me/no-such-model': {words.splitlines()[0]}"


def test_a_folder_that_is_no_model_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="^target.path='empty': no config.json there$"):
        load_target(TargetConfig(path="empty"))
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="^target.path='empty': .+$") as error:
        load_target(TargetConfig(path="empty"))
    assert "\n" not in str(error.value)


def test_a_disk_that_fails_is_no_wrong_input(monkeypatch):
    def fail(*args, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        load_target(TargetConfig(path="me/model"))
