"""kvconv doctor."""

import errno
import json
import os

from click.testing import CliRunner

from kvconv.cli import doctor, main


def test_doctor_reports_a_complete_installation():
    result = CliRunner().invoke(main, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert report["problems"] == []
    assert "CPUExecutionProvider" in report["providers"]
    assert report["op_library"].endswith("libkvconv_ops.so")


def test_doctor_names_what_is_missing(monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else real(name))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert 'torch not installed, needed to export: pip install "kvconv[export]"' in result.stdout
    assert "nothing is missing" not in result.stdout


def test_doctor_warns_when_both_onnxruntimes_are_installed(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0")
    assert "both installed" in CliRunner().invoke(main, ["doctor"]).stdout


def test_doctor_reports_kept_bundles_that_cannot_be_read(monkeypatch):
    def unreadable():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/kept")

    monkeypatch.setattr(doctor, "cache_usage", unreadable)
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    [problem] = json.loads(result.stdout)["problems"]
    assert "/kept: Permission denied" in problem
