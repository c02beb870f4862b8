"""What pip installs: the five folders under one name, and nothing else."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("autograd", "transformer", "lora", "optim", "train")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, built from a clean copy."""
    source, out = tmp_path_factory.mktemp("source") / "afinar", tmp_path_factory.mktemp("dist")
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    subprocess.run(
        [sys.executable, "-m", "build", "-o", str(out), str(source)],
        check=True,
        capture_output=True,
    )
    return out


def test_the_wheel_holds_the_packages_under_one_name(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"afinar"}
    for package in PACKAGES:
        assert f"afinar/{package}/__init__.py" in names
        assert f"afinar/{package}/py.typed" in names
    assert len(list(built.glob("*.tar.gz"))) == 1


def test_the_wheel_runs_in_a_fresh_environment(built, tmp_path):
    """Installed beside the dependencies of this environment, from an empty folder."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True, system_site_packages=False)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True, cwd=tmp_path)
    imports = "; ".join(f"import afinar.{p}" for p in PACKAGES)
    code = f"{imports}; import sys; print(sorted(m for m in ('torch', 'cupy') if m in sys.modules))"
    done = subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "afinar", "--version"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.startswith("afinar 0.")
