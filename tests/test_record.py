"""metrics.jsonl is the record; the W&B mirror follows it without a network."""

import json

import pytest

from spectrain import record
from spectrain.config import RunConfig, WandbConfig
from spectrain.record import Record


def config(enabled=False):
    return RunConfig(recipe="test", wandb=WandbConfig(enabled=enabled))


def test_lines_after_the_restored_step_and_a_cut_line_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    resumed = Record(tmp_path, config(), last_step=2)
    resumed.write({"step": 3, "train/loss": 0.5})
    resumed.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "train/loss": 0.5}\n'


def test_a_line_is_in_the_file_before_the_next_step(tmp_path):
    open_record = Record(tmp_path, config(), last_step=0)
    open_record.write({"step": 1})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1}
    open_record.close()


def test_a_loss_that_doubled_since_the_first_step_is_told_once_and_after_a_restart(tmp_path, caplog):
    def told(last_step, losses):
        caplog.clear()
        opened = Record(tmp_path, config(), last_step=last_step)
        for step, loss in enumerate(losses, last_step + 1):
            opened.write({"step": step, "train/loss": loss})
        opened.close()
        return [r.getMessage() for r in caplog.records]

    assert told(0, [0.0, 12.0, 5.0, 24.0]) == []  # 0.0: a step without rows
    [message] = told(4, [5.0, 24.5, 111_000.0])
    assert message == (
        "step 6: the loss is 24.5, the first step had 12: training diverges; lower train.learning_rate and, "
        "with train.optimizer=muon, train.muon_learning_rate"
    )


def test_the_mirror_gets_scalars_and_numbered_entries_of_lists():
    line = {"step": 4, "train/alpha": [0.5, None], "train/grad_norm": None, "eval/tau": 1.5}
    assert record._flat(line) == {"step": 4, "train/alpha_0": 0.5, "eval/tau": 1.5}


@pytest.mark.parametrize(
    ("key", "login", "mode"),
    [("", "", "offline"), ("k", "", "online"), ("", "api.wandb.ai", "online"), ("", "x", "offline")],
)
def test_the_mirror_is_online_only_with_a_key_or_a_login(tmp_path, monkeypatch, key, login, mode):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if login:
        (tmp_path / "netrc").write_text(f"machine {login}\n  login user\n  password secret\n")
    assert record._wandb_mode() == mode


@pytest.mark.filterwarnings("ignore")  # of W&B's own process handling
def test_an_offline_mirror_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    mirrored = Record(tmp_path, config(enabled=True), last_step=0)
    mirrored.write({"step": 1, "train/loss": 0.5})
    mirrored.close()
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{record.run_id(tmp_path)}/*.wandb"))) == 1
