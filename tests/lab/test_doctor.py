"""The doctor: says what is here, finds what is broken, stays offline."""

from __future__ import annotations

import dataclasses
import socket
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

import mars
from mars.lab import doctor, optimizers, recipes
from mars.lab.cli import main
from mars.lab.config import Optimizer
from mars.lab.doctor import DoctorArgs, compare, doctor_command
from mars.lab.errors import LabError


def test_all_is_said_and_nobody_is_called(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    doctor_command(DoctorArgs(device="cpu"))
    said = capsys.readouterr().out
    assert f"mars {mars.__version__}" in said
    assert f"torch {torch.__version__}" in said
    for name in (*recipes.RECIPES, *optimizers.REGISTRY, "optuna"):
        assert f"  {name} " in said
    assert said.count("on cpu: it needs a CUDA device") >= 4 * 3
    assert said.count(" right; off from the reference engine") == 4
    assert "FAILS" not in said
    assert f"free in {tmp_path}" in said
    assert said.endswith("everything needed to train is here\n")


def test_a_missing_package_is_named_and_is_an_error_if_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", (("no_such_extra", "nothing"),))
    doctor_command(DoctorArgs(device="cpu"))
    said = capsys.readouterr().out
    assert "optional and missing: pip install no_such_extra" in said
    assert said.endswith("everything needed to train is here\n")

    monkeypatch.setattr(doctor, "NEEDED", (*doctor.NEEDED, ("no_such_package", "tests")))
    with pytest.raises(LabError, match="no_such_package is needed: pip install no_such_package"):
        doctor_command(DoctorArgs(device="cpu"))
    assert "everything needed" not in capsys.readouterr().out


@pytest.mark.parametrize("lacking", ["tyro", "tyro numpy"])
def test_the_doctor_needs_torch_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    for name in lacking.split():
        monkeypatch.setitem(sys.modules, name, None)
    real = doctor.version

    def installed(name: str) -> str:
        if name in lacking.split():
            raise PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor, "version", installed)
    monkeypatch.setattr(doctor, "TYPES", ("mars-lion",))
    code = main(["doctor", "--device", "cpu"])
    said = capsys.readouterr()
    assert "on cpu: it needs a CUDA device" in said.out
    assert "optional and missing: pip install tyro" in said.out
    if lacking == "tyro":
        assert code == 0
        assert "every other command needs it" in said.out
        assert "everything needed" not in said.out
    else:
        assert code == 1
        assert said.err.endswith("does not work here: numpy is needed: pip install numpy\n")


def test_an_engine_that_computes_something_else_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = optimizers.REGISTRY["mars-lion"]

    def wrong(model: Any, o: Optimizer, options: dict[str, Any]) -> Any:
        rate = o.lr * (1.03 if options.get("foreach") else 1.0)
        return entry.build(model, dataclasses.replace(o, lr=rate, lr_1d=o.lr), options)

    monkeypatch.setitem(optimizers.REGISTRY, "mars-lion", dataclasses.replace(entry, build=wrong))
    with pytest.raises(LabError, match=r"foreach is off by 0\.0[23]\d* of the update"):
        compare("mars-lion", torch.device("cpu"))
    with pytest.raises(LabError, match="training does not work here: mars-lion on cpu fails"):
        doctor_command(DoctorArgs(device="cpu"))
    assert "FAILS: foreach is off by" in capsys.readouterr().out


def test_an_optimizer_that_cannot_be_had_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(model: Any, o: Optimizer, options: dict[str, Any]) -> Any:
        raise LabError("soap needs pytorch_optimizer: pip install pytorch_optimizer")

    entry = dataclasses.replace(optimizers.REGISTRY["soap"], build=missing)
    monkeypatch.setitem(optimizers.REGISTRY, "soap", entry)
    lines = list(doctor.optimizers(torch.device("cpu")))
    (soap,) = [line for line in lines if line.startswith("soap")]
    assert "not available: soap needs pytorch_optimizer" in soap
    assert sum("not available" in line for line in lines) == 1


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(LabError, match="'tpu7'"):
        doctor_command(DoctorArgs(device="tpu7"))
