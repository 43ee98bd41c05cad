"""`make gpu`: parts run one after another, failing ones too, into one report."""

import pytest

from recipes.benchmarks import gpu


@pytest.fixture
def parts(monkeypatch):
    made = {
        "bad": (1, ["-c", "import sys; print('so it goes'); sys.exit(3)"]),
        "slow": (0.05, ["-c", "import time; print('a first row'); time.sleep(60)"]),
        "good": (1, ["-c", "print(3 + 4)"]),
    }
    monkeypatch.setattr(gpu, "parts_for", lambda folder, device, small, length: made)


def test_a_failing_part_does_not_stop_the_others(parts, tmp_path, capsys):
    flags = ["--device", "cpu", "--output_dir", str(tmp_path)]
    assert gpu.main(flags) == 1
    assert "Failed: bad, slow." in capsys.readouterr().out
    bad, slow, good = (tmp_path / "report.md").read_text().split("### ")[1:]
    assert bad.startswith("bad: failed with exit status 3") and "\nso it goes\n" in bad
    assert slow.startswith("slow: stopped at its limit") and "\na first row\n" in slow
    assert good.startswith("good: done") and "\n7\n```" in good and "torch " in good
    # A part that is run alone keeps what is known of the others
    assert gpu.main([*flags, "--parts", "good"]) == 0
    assert (tmp_path / "report.md").read_text().split("### ")[1:3] == [bad, slow]


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["--output_dir", str(tmp_path / "gpu")]) == 1
    assert capsys.readouterr().out.startswith("No GPU is there.") and not (tmp_path / "gpu").exists()


def test_the_limits_of_all_parts_are_25_minutes(tmp_path):
    assert sum(limit for limit, _ in gpu.parts_for(tmp_path, "cuda", False, 4096).values()) <= 25


@pytest.mark.slow
def test_a_part_from_end_to_end(tmp_path, capsys):
    flags = "--device cpu --small --parts advantages --output_dir".split()
    assert gpu.main([*flags, str(tmp_path)]) == 0, capsys.readouterr().out
    assert "\n1024 × 2048 " in (tmp_path / "report.md").read_text()
