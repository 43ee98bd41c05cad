"""`make gpu`: parts run one after another, failing ones too, into one report."""

import json

import pytest

from recipes.benchmarks import gpu


@pytest.fixture
def parts(monkeypatch):
    def fake(folder, device, small, length):
        def read():
            return "", [["read"], [(folder / "good.json").read_text()]]

        leaves = f"open({str(folder / 'good.json')!r}, 'w').write('7')"
        return {
            "bad": gpu.Part("A bad one", 1, ["-c", "import sys; print('so it goes'); sys.exit(3)"], read),
            "slow": gpu.Part("A slow one", 0.005, ["-c", "import time; time.sleep(60)"], read),
            "good": gpu.Part("A good one", 1, ["-c", leaves], read),
        }

    monkeypatch.setattr(gpu, "parts_for", fake)


def test_a_failing_part_does_not_stop_the_others(parts, tmp_path, capsys):
    flags = ["--device", "cpu", "--output_dir", str(tmp_path)]
    assert gpu.main(flags) == 1
    assert "Failed: bad, slow." in capsys.readouterr().out
    page = (tmp_path / "report.md").read_text()
    assert "### A bad one: failed with exit status 3" in page and "so it goes" in page
    assert "### A slow one: stopped at its limit" in page
    assert "### A good one: done" in page and "| read |\n| --- |\n| 7 |" in page
    report = json.loads((tmp_path / "report.json").read_text())
    assert "torch " in report["machine"] and list(report["parts"]) == ["bad", "slow", "good"]
    # A part that is run alone keeps what is known of the others
    assert gpu.main([*flags, "--parts", "good"]) == 0
    assert list(json.loads((tmp_path / "report.json").read_text())["parts"]) == ["bad", "slow", "good"]


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["--output_dir", str(tmp_path / "gpu")]) == 1
    assert capsys.readouterr().out.startswith("No GPU is there.") and not (tmp_path / "gpu").exists()


def test_the_limits_of_all_parts_are_25_minutes(tmp_path):
    assert sum(part.limit for part in gpu.parts_for(tmp_path, "cuda", False, 4096).values()) <= 25


@pytest.mark.slow
def test_a_part_from_end_to_end(tmp_path, capsys):
    flags = "--device cpu --small --parts advantages --output_dir".split()
    assert gpu.main([*flags, str(tmp_path)]) == 0, capsys.readouterr().out
    assert "| 1024 × 2048 |" in (tmp_path / "report.md").read_text()
