"""Checks of the Prometheus configuration and rules by promtool."""

import re
import subprocess
from pathlib import Path


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool(promtool, docker):
    directory = docker / "observability"
    run(promtool, "check", "config", "--syntax-only", directory / "prometheus.yml")
    rules = len(re.findall(r"- (?:alert|record):", (directory / "rules.yml").read_text()))
    assert rules > 0
    assert f"{rules} rules" in run(promtool, "check", "rules", directory / "rules.yml")
    run(promtool, "test", "rules", directory / "rules.test.yml")


def test_the_scrape_job_of_the_docs(promtool, docker, tmp_path):
    """The job in docs/how-to/monitor.md is valid.

    The one in kubernetes/README.md is not checked: Debian's Prometheus has no Kubernetes support.
    """
    text = (docker.parent / "docs" / "how-to" / "monitor.md").read_text()
    (job,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", text, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(job)
    run(promtool, "check", "config", "--syntax-only", tmp_path / "prometheus.yml")
