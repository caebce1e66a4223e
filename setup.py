"""Keeps the git commit in the installed package, for env.json; everything else is in pyproject.toml."""

import json
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if (ROOT / ".git").exists() and shutil.which("git") and not self.editable_mode:
            changed = bool(git("status", "--porcelain", "--untracked-files=no"))
            commit = {"git_commit": git("rev-parse", "HEAD") or None, "git_changed": changed}
            (Path(self.build_lib) / "ppattn/commit.json").write_text(json.dumps(commit))


setup(cmdclass={"build_py": BuildWithCommit})
